"""textarena's games as episodes: drawn one by one, a function of the seed, with random numbers of their own."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import threading
from importlib.util import find_spec

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_code

from treetune import Action, build_taskset, make
from treetune.errors import EnvironmentFault
from treetune.tasksets.textarena.taskset import BRACKETS

pytestmark = pytest.mark.skipif(find_spec("textarena") is None, reason="the extra textarena is not installed")

ALONE = [
    *("2048-v0", "Bandit-v0", "Blackjack-v0", "Countdown-v0", "Crosswords-v0", "Cryptarithm-v0", "FifteenPuzzle-v0"),
    *("FrozenLake-v0", "GuessTheNumber-v0", "LightsOut-v0", "LogicPuzzle-v0", "Mastermind-v0", "Minesweeper-v0"),
    *("PegJump-v0", "Secretary-v0", "Set-v0", "Slitherlink-v0", "Sudoku-v0", "ThreeCardMonte-v0", "TowerOfHanoi-v0"),
]
"""Games for one player that start without a network, but for two that take half a second."""
TOGETHER = [
    *("GameOfPureStrategy-v0", "IndianPoker-v0", "IteratedMatchingPennies-v0", "IteratedPrisonersDilemma-v0"),
    *("IteratedRockPaperScissors-v0", "KuhnPoker-v0", "LiarsDice-v0", "Othello-v0", "Poker-v0", "SimpleTak-v0"),
    *("Snake-v0", "Surround-v0", "ThreePlayerGOPS-v0", "ThreePlayerTicTacToe-v0", "TicTacToe-v0", "WildTicTacToe-v0"),
]
"""Games in which a random opponent finds its moves."""


def taskset(game="GuessTheNumber-v0", **keys):
    return build_taskset({"id": "textarena", "game": game, **keys})


def play(task, moves):
    """The observations and the last step of an episode; `moves` is asked for each move with what is seen."""
    environment = make(task.env_class, task)
    seen = [environment.start()]
    while True:
        step = environment.step(Action.of(moves(seen)))
        seen.append(step.observation.content)
        if step.done:
            return seen, step


class Player:
    """Tries what the game offers, and cannot be told apart from itself a second time."""

    def __init__(self, seed=0):
        self.rng = random.Random(seed)

    def __call__(self, seen):
        return self.rng.choice(BRACKETS.findall(seen[-1]) or BRACKETS.findall(seen[0]) or ["[0 0]"])


# Drawing


@settings(max_examples=settings.default.max_examples // 5)
@given(st.lists(st.integers(0, 10**9 - 1), min_size=1, max_size=4), st.integers(0, 5))
def test_an_episode_depends_on_seed_and_index_alone(indices, seed):
    one, other = (taskset("FrozenLake-v0", seed=seed, num_tasks=10**9) for _ in "ab")
    assert [one[index] for index in indices] == [other[index] for index in reversed(indices)][::-1]


def test_random_access_equals_iteration_and_nothing_else_is_built(monkeypatch):
    from treetune.tasksets.textarena import taskset as module

    built = []
    environment = module.TextArenaEnvironment
    original = environment.start
    monkeypatch.setattr(environment, "start", lambda self: built.append(self.task.seed) or original(self))
    drawn = taskset("FrozenLake-v0", num_tasks=1000).select_tasks(5)
    assert len(built) == 5
    everything = list(taskset("FrozenLake-v0", num_tasks=40))
    assert everything[:5] == drawn
    assert [taskset("FrozenLake-v0", num_tasks=40)[index] for index in range(40)] == everything
    assert pickle.loads(pickle.dumps(taskset("FrozenLake-v0"))).select_tasks(5) == drawn
    with raises_code("usage", "task 40"):
        taskset(num_tasks=40)[40]


def test_seeds_are_apart_and_never_added():
    seeds = [{task.seed for task in taskset("FrozenLake-v0", seed=seed).draw(50)} for seed in (7, 8, 9)]
    assert len(set.union(*seeds)) == 150
    boards = [[task.prompt for task in taskset("Sudoku-v0", seed=seed).draw(4)] for seed in (7, 8)]
    assert not set(boards[0]) & set(boards[1])


def test_episodes_that_look_alike_are_different_tasks():
    tasks = taskset("GuessTheNumber-v0").select_tasks(30)
    assert len({task.prompt for task in tasks}) == 1
    assert len({task.uid for task in tasks}) == 30


@pytest.mark.parametrize("game", ALONE)
def test_the_first_observation_is_what_the_task_says(game):
    for task in taskset(game).draw(3):
        assert make(task.env_class, task).start() == task.prompt


DRAW = """
import json, sys
from treetune import build_taskset
uids = []
for game, opponent in json.loads(sys.argv[1]):
    drawn = build_taskset({"id": "textarena", "game": game, "opponent": opponent})
    uids.append([task.uid for task in drawn.draw(2)])
print("\\n" + json.dumps(uids))
"""


@pytest.mark.thorough
def test_another_process_with_other_hashes_draws_the_same():
    games = [(game, "") for game in ALONE] + [(game, "random") for game in TOGETHER]
    runs = [
        subprocess.run(
            [sys.executable, "-c", DRAW, json.dumps(games)],
            capture_output=True,
            text=True,
            timeout=120,
            env={"PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    uids = [json.loads(run.stdout.splitlines()[-1]) for run in runs]
    assert uids[0] == uids[1]
    assert len(uids[0]) == len(games)


# Random numbers


def test_the_global_generators_are_left_as_they_were():
    import numpy

    random.seed(5)
    numpy.random.seed(5)
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    task = taskset("Minesweeper-v0")[3]
    play(task, Player())
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


@pytest.mark.parametrize("game", ["Blackjack-v0", "2048-v0", "Bandit-v0"])
def test_draws_of_others_do_not_change_a_game_that_draws_as_it_goes(game):
    task = taskset(game)[0]
    quiet = play(task, Player())

    def noisy(seen, player=Player()):  # noqa: B008
        random.seed(len(seen))
        random.random()
        return player(seen)

    assert play(task, noisy) == quiet


def test_episodes_side_by_side_do_not_see_each_other():
    tasks = taskset("Blackjack-v0").select_tasks(8)
    alone = [play(task, Player())[0] for task in tasks]
    together: dict[int, list[str]] = {}

    def run(number):
        together[number] = play(tasks[number], Player())[0]

    threads = [threading.Thread(target=run, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [together[number] for number in range(8)] == alone


def test_a_game_that_hangs_is_told_to_the_others(monkeypatch):
    from treetune.tasksets import textarena as textarena_game

    task = taskset()[0]
    monkeypatch.setattr(textarena_game, "WAIT_SECONDS", 0.05)
    with textarena_game.busy, raises_code("environment", "textarena", "0 seconds"):
        make("textarena", task).start()


# Playing


@pytest.mark.parametrize(
    "game",
    [
        "GuessTheNumber-v0",
        "Mastermind-v0-hard",
        "Secretary-v0",
        "Sudoku-v0-medium",
        "ThreeCardMonte-v0",
        "TowerOfHanoi-v0",
    ],
)
def test_gold_wins(game):
    drawn = taskset(game)
    for task in drawn.draw(3):
        moves = iter(drawn.gold(task))
        _, step = play(task, lambda seen, moves=moves: next(moves))
        assert (step.reward, step.truncated) == (1.0, False)
        assert next(moves, None) is None


def test_gold_is_unknown_for_most_games():
    drawn = taskset("2048-v0")
    assert drawn.gold(drawn[0]) is None


def test_gold_earns_one_on_the_command_line(treetune):
    result = treetune("eval", "textarena", "-n", "20", "-m", "scripted:gold", "--json")
    assert result.json["mean_reward"] == 1.0
    assert treetune("validate", "textarena", "-n", "5", "--json").json["valid"] == 5


def test_only_what_is_new_is_shown_and_not_ones_own_words():
    task = taskset("GuessTheNumber-v0", params={"min_number": 1, "max_number": 2000, "max_turns": 5})[0]
    seen, step = play(task, lambda seen: f"I say [{len(seen)}]")
    assert seen[1] == "The target number is higher."
    assert not any("I say" in text for text in seen)
    assert 0 <= step.reward < 1
    assert "turn limit" in step.info["explanation"]


def test_an_episode_without_an_end_is_cut_off():
    task = taskset("2048-v0", max_turns=7)[0]
    seen, step = play(task, lambda seen: ["[up]", "[left]", "[right]", "[down]"][len(seen) % 4])
    assert (len(seen), step.truncated) == (8, True)


def test_a_task_of_another_version_is_not_played():
    task = msgspec.structs.replace(taskset()[0], prompt="Guess!")
    with raises_code("environment", "GuessTheNumber-v0", "opponent"):
        make("textarena", task).start()


# Several players


@pytest.mark.parametrize("game", TOGETHER)
def test_a_random_opponent_plays_to_the_end_by_the_rules(game):
    drawn = taskset(game, opponent="random")
    for task in drawn.draw(2):
        environment = make("textarena", task)
        seen = [environment.start()]
        assert seen[0] == task.prompt
        rng = random.Random(1)
        for _ in range(200):
            # The policy keeps to the rules too, else it would only be seen how it loses.
            offers = [move for text in reversed(seen) for move in BRACKETS.findall(text)]
            move = next(move for move in rng.sample(offers, len(offers)) if environment.game.allows(move))
            step = environment.step(Action.of(move))
            seen.append(step.observation.content)
            if step.done:
                break
        assert step.done
        assert -1 <= step.reward <= 1


def test_a_list_of_moves_is_an_opponent():
    drawn = taskset("IteratedRockPaperScissors-v0", opponent=["[rock]"])
    _, step = play(drawn[0], lambda seen: "[paper]")
    assert step.reward == 1.0
    _, step = play(drawn[0], lambda seen: "[scissors]")
    assert step.reward == -1.0


def test_moves_that_the_rules_forbid_at_the_moment_are_left_out():
    drawn = taskset("TicTacToe-v0", opponent=[f"[{cell}]" for cell in range(9)])
    for task in drawn.draw(5):
        taken = iter(range(9))

        def next_free(seen, taken=taken):
            return next(f"[{cell}]" for cell in taken if f"[{cell}]" in seen[-1])

        _, step = play(task, next_free)
        assert step.reward in (-1.0, 0.0, 1.0)


def test_a_function_in_a_file_is_an_opponent(tmp_path, treetune):
    (tmp_path / "opponents.py").write_text(
        "def copycat(observation, rng):\n    return '[defect]' if '[defect]' in observation[-200:] else '[cooperate]'\n"
    )
    (tmp_path / "play.yaml").write_text(
        "taskset:\n  id: textarena\n  game: IteratedRockPaperScissors-v0\n  opponent: rps.py:rock\n"
        "model: scripted:echo\nnum_tasks: 2\n"
    )
    (tmp_path / "rps.py").write_text("def rock(observation, rng):\n    return '[rock]'\n")
    result = treetune("eval", "play.yaml", "--json")
    assert result.json["outcomes"] == {"completed": 2}
    drawn = taskset("IteratedPrisonersDilemma-v0", opponent=f"{tmp_path / 'opponents.py'}:copycat")
    assert "cooperate" in "".join(play(drawn[0], lambda seen: "[cooperate]")[0])


def test_an_opponent_that_breaks_the_rules_is_a_failure_and_no_victory(tmp_path):
    (tmp_path / "bad.py").write_text(
        "def invalid(observation, rng):\n    return 'hm'\n"
        "def broken(observation, rng):\n    raise KeyError('x')\n"
        "def silent(observation, rng):\n    return None\n"
    )
    for name, said in {
        "invalid": "lost by an invalid move",
        "broken": "failed: KeyError",
        "silent": "NoneType",
    }.items():
        task = taskset("TicTacToe-v0", opponent=f"{tmp_path / 'bad.py'}:{name}")[0]
        with pytest.raises(EnvironmentFault, match=said):
            play(task, lambda seen: "[4]" if len(seen) == 1 else "[0]")
    with raises_code("environment", "--taskset.opponent"):
        play(taskset("TicTacToe-v0", opponent=["[99]"])[0], lambda seen: "[4]")


def test_a_policy_that_breaks_the_rules_loses():
    _, step = play(taskset("TicTacToe-v0", opponent="random")[0], lambda seen: "hm")
    assert step.reward == -1.0


def test_where_the_others_begin_they_have_moved_before_the_first_observation():
    drawn = taskset("KuhnPoker-v0", opponent="random")
    assert any("Player 1, submitted move" in task.prompt for task in drawn.draw(5))


def test_who_plays_the_others_must_be_said():
    with raises_code("taskset", "2 players", "--taskset.opponent"):
        taskset("TicTacToe-v0")
    with raises_code("taskset", "2 players"):
        taskset("PublicGoodsGame-v0")
    with raises_code("config", "taskset.opponent"):
        taskset("Sudoku-v0", opponent="random")
    assert taskset("Snake-v0", opponent="random", players=4)[0].players == 4
    with raises_code("config", "with 3"):
        taskset("TicTacToe-v0", opponent="random", players=3)


# What does not start


def test_names_and_params_are_checked():
    with raises_code("unknown-name", "'Sudoku-v0'"):
        taskset("Soduku-v0")
    with raises_code("config", "'size'", "SudokuEnv.__init__"):
        taskset("Sudoku-v0", params={"size": 4})


WITHOUT_DATA = """
import nltk
nltk.data.path = ["/nowhere"]
nltk.download = lambda *names, **keys: print("fetched")
from treetune import build_taskset
try:
    build_taskset({"id": "textarena", "game": "Hangman-v0"})
except Exception as error:
    print(type(error).__name__, error)
"""


def test_missing_data_of_nltk_is_named_and_never_fetched():
    run = subprocess.run([sys.executable, "-c", WITHOUT_DATA], capture_output=True, text=True, timeout=60)
    assert "TasksetError Hangman-v0 does not start: LookupError" in run.stdout
    assert "nltk.download('words')" in run.stdout
    assert "python -m nltk.downloader NAME" in run.stdout
    assert "fetched" not in run.stdout


def test_data_of_nltk_that_is_there_is_enough(tmp_path, treetune):
    words = tmp_path / "nltk_data" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic", "README"):
        (words / name).write_text("apple\nbread\nhouse\nlight\n")
    result = treetune(
        "show", "textarena", "--taskset.game", "Hangman-v0", "-n", "1", NLTK_DATA=str(tmp_path / "nltk_data")
    )
    assert result.code == 0, result.err
    assert "Hangman" in result.out


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there it runs")
def test_a_game_for_a_newer_python_says_so():
    with raises_code("taskset", "Chess-v0", "SyntaxError"):
        taskset("Chess-v0", opponent="random")


def test_games_that_ask_a_model_or_miss_a_package_or_file_say_so(monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with raises_code("taskset", "ValueError", "OPENROUTER_API_KEY"):
        taskset("TwentyQuestions-v0")
    with raises_code("taskset", "BabyAiText-v0", "'gym'"):
        taskset("BabyAiText-v0")
    with raises_code("taskset", "FileNotFoundError"):
        taskset("UsedCarNegotiation-v0")


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with raises_code("missing-extra", "treetune[textarena]"):
        taskset()
