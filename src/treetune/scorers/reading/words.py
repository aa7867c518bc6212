"""Words that deny, leave open and take back a value, in nine languages, and what they mean for the text around it.

denied("It is not ")                  # True: before a value
refused(" is wrong.")                 # True: after it
hedged("maybe 5"), hedged("5 or 6")   # True, True
taken_back(". Wait, I meant 6.")      # True: anywhere after it
"""

from __future__ import annotations

import re
from itertools import pairwise

NEAR = 80
"""How many characters around a value are checked."""
FAR = 400
"""How many characters after an answer can take it back."""


def words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower().replace("’", "'"))


def denied(ahead: str) -> bool:
    """Whether the text before a value, in the same clause, says that it is not the answer."""
    ahead = ahead[-NEAR:]
    for place, word in enumerate(reversed(_tokens(ahead))):
        if word in _TURNS:
            return False
        if word in _NOT or word.endswith("n't") or (place < 3 and word in _WRONG):
            return True
    return not ahead.isascii() and _NOT_ASIAN.search(ahead) is not None


def refused(behind: str) -> bool:
    """Whether the text after a value, in the same clause, says that it is not the answer, or asks."""
    behind = behind[:NEAR].lstrip(" ,)]*_`\"'”’")
    if behind.startswith(_REFUSING):
        return True
    verb = -9
    for place, word in enumerate(_tokens(behind)):
        if word in _TURNS:
            break
        if word in _VERBS:
            verb = place
        elif word == "cannot" or word.endswith("n't") or (place - verb <= 3 and (word in _NOT or word in _WRONG)):
            return True
    return False


def hedged(text: str) -> bool:
    """Whether a text offers several answers, or none for sure: `A or B`, `maybe A`, `some say A`, `A?`."""
    if "?" in text:
        return True
    words = words_of(text)
    if not _OPEN.isdisjoint(words) or (len(words) > 1 and not _OPEN_PAIRS.isdisjoint(pairwise(words))):
        return True
    return not text.isascii() and _OPEN_ASIAN.search(text) is not None


def taken_back(behind: str) -> bool:
    """Whether the text after an answer takes it back: `5. Sorry, I meant 6.`"""
    if len(behind) < 4:
        return False
    low = behind[:FAR].lower().replace("’", "'")
    return not _BACK.isdisjoint(_FIRST_WORD.findall(low)) or any(words in low for words in _BACK_PHRASES)


def unsure(text: str) -> bool:
    """Whether a reply says that it does not know."""
    low = text.lower().replace("’", "'")
    return any(words in low for words in _UNSURE)


def polite(text: str) -> bool:
    """Whether a sentence is only polite: `I hope this helps!`"""
    return text.lower().startswith(_POLITE)


def _tokens(text: str) -> list[str]:
    return _TOKEN.findall(text.lower().replace("’", "'"))


def _phrases(text: str) -> tuple[str, ...]:
    """Phrases, in which an underscore is a space."""
    return tuple(phrase.replace("_", " ") for phrase in text.split())


_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_TOKEN = re.compile(r"rul\w+ out|(?:any|every)thing but|[^\W_]+(?:['-][^\W_]+)*|[,;:.!?–—(\n，。；：、]|≠|!=|\\neq?")
_NOT = frozenset(
    r"""
    not never nor neither no except unlike exclude excludes excluded eliminate eliminates eliminated ≠ != \ne \neq
    nicht niemals kein keine keiner keinen weder pas jamais aucun aucune ni nunca tampoco não nem non mai né не нет
    ни
    """.split()
) | {"rule out", "rules out", "ruled out", "ruling out", "anything but", "everything but"}
_WRONG = frozenset(
    r"""
    wrong incorrect false invalid impossible unlikely falsch inkorrekt falsche faux fausse incorrecte mauvaise
    incorrecto incorrecta falso falsa errado errada sbagliato sbagliata неверно неправильно неверный
    """.split()
)
_TURNS = frozenset(
    r"""
    , ; : . ! ? – — ( ， 。 ； ： 、 but rather so thus therefore hence then leaving leaves leave instead doubt because
    since as while whereas sondern also daher somit weil da denn zweifel mais donc car doute parce sino pero porque
    duda portanto mas bensì ma quindi perché но а поэтому
    """.split()
) | {"\n"}
"""Where a clause ends, or turns into its opposite."""
_VERBS = frozenset(
    r"""
    is are was were be been can could does do did would seems looks ist sind war est sont était es son era fue é são
    è sono that this it
    """.split()
)
_REFUSING = ("?", "？", "❌", "✗", "不", "是错", "是不", "错", "ではな", "ではあり", "じゃな", "は間違", "は不")
_OPEN = frozenset(
    r"""
    or either maybe perhaps possibly alternatively versus vs unsure unless might oder entweder vielleicht bzw
    beziehungsweise ou soit peut-être quizás quizá talvez oppure forse или либо возможно
    """.split()
)
_OPEN_PAIRS = frozenset(
    tuple(pair.split("_"))
    for pair in """
    could_be could_also may_be may_well could_well might_well people_would many_would would_say would_guess not_sure
    not_certain if_not some_say others_say people_say many_say some_think others_think some_believe some_argue
    i_doubt we_doubt tal_vez right_too fine_too correct_too possible_too manche_sagen certains_disent algunos_dicen
    """.split()
)
_NOT_ASIAN = re.compile(r"(?:不是|不|非|并非|没有)[^，。；、,.;]*$")
_OPEN_ASIAN = re.compile("或|还是|也许|可能|要么|または|あるいは|どちら|かもしれ|？|¿")
_FIRST_WORD = re.compile(r"(?:[.!?;,\n…。！？；，]|\s[-–—]|[—–])[\s*_\"'(]*([^\W_]+(?:['-][^\W_]+)*)")
_BACK = frozenset(
    r"""
    no wait hold actually hmm hm sorry oops correction scratch apologies nein moment halt korrektur entschuldigung
    verzeihung non attendez attends pardon espera perdón corrección desculpe espere scusa aspetta нет стоп извините
    простите подождите 不对 不 更正 抱歉 等等 等一下 いや すみません 訂正
    """.split()
)
"""Words that take an answer back if they begin a sentence or a clause after it."""
_BACK_PHRASES = _phrases(
    """
    i_meant i_mean_ i_mean, my_mistake i_was_wrong a_mistake an_error scratch_that second_thought let_me_correct
    let_me_redo let_me_recheck ich_meine ich_meinte je_voulais je_me_suis_tromp je_corrige quise_decir me_equivoqué
    corrijo volevo_dire quis_dizer я_ошиб точнее 我错了 不对 いや、 更正 訂正 是错的 間違え
    ._or_ ?_or_ !_or_ ._alternatively
    oder_doch could_also_be might_also_be may_also_be might_be_right could_be_right or_maybe but_maybe or_perhaps
    changed_my_mind withdraw on_reflection take_that_back take_it_back strike_that disregard ignore_that
    that_is_wrong that's_wrong that_is_incorrect that's_incorrect which_is_wrong which_is_incorrect it_is_wrong
    it's_wrong this_is_wrong this_is_incorrect not_the_right_answer not_the_correct_answer that_is_not_ that's_not_
    könnte_auch pourrait_aussi podría_ser_también 也可能
    """
)
_UNSURE = _phrases(
    """
    don't_know do_not_know no_idea can't_tell cannot_tell cannot_determine can't_determine can't_say cannot_say
    decline_to refuse_to won't_answer unable_to can't_answer cannot_answer not_enough_information
    insufficient_information no_way_to no_way_of not_sure can't_solve cannot_solve weiß_ich_nicht weiß_es_nicht
    weiß_nicht keine_ahnung ne_sais_pas aucune_idée no_sé no_lo_sé non_so non_lo_so não_sei
    не_знаю 不知道 不确定 わかりません
    分かりません
    """
)
_POLITE = _phrases(
    """
    i_hope hope_this hope_that hope_it let_me_know please_let_me_know feel_free please_feel_free if_you_have
    if_you_need if_you_want if_you_would if_you'd happy_to cheers regards best_regards kind_regards sincerely glad_
    i'm_glad is_there_anything do_you_have do_you_need do_you_want good_luck best_of_luck lass_es_mich melde_dich
    ich_hoffe j'espère n'hésite espero ¡espero avísame spero надеюсь 希望 如果你 如果您 would_you_like
    thank you're_welcome
    have_a_great
    """
)
