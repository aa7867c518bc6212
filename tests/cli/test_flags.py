"""Flags and verbs that people type out of habit are told what they are called here."""

from __future__ import annotations

import pytest
from typer.main import get_command

from treetune.cli.app import VERBS, make_app
from treetune.cli.flags import VERBS as OTHER_VERBS
from treetune.cli.options import OVERRIDABLE


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--temperature 0.7", "--sampling.temperature 0.7"),
        ("--temperature=0.7", "--sampling.temperature 0.7"),
        ("--top-p 0.9", "--sampling.top_p 0.9"),
        ("--max-tokens 512", "--sampling.max_tokens 512"),
        ("--max-new-tokens 512", "--sampling.max_tokens 512"),
        ("--top-k 5", "--sampling.extra.top_k 5"),
        ("--presence-penalty 0.5", "--sampling.extra.presence_penalty 0.5"),
        ("--extra-body {top_k:5}", "--sampling.extra '{top_k:5}'"),
        ("--level 3", "--taskset.level 3"),
        ("--levle 3", "--taskset.level 3"),
        ("--difficulty 3", "--taskset.level 3"),
        ("--base-url http://127.0.0.1:8000/v1", "--endpoint.base_url http://127.0.0.1:8000/v1"),
        ("--port 8000", "--endpoint.base_url http://127.0.0.1:8000/v1"),
        ("--batch-size 8", "-c 8"),
        ("--concurrency 8", "-c 8"),
        ("--limit 10", "-n 10"),
        ("--tasks 10", "-n 10"),
        ("--epochs 4", "-r 4"),
        ("--num-rolouts 4", "--num-rollouts"),
        ("--rollouts-per-example 4", "-r 4"),
        ("--max-steps 4", "--limits.max_turns 4"),
        ("--time-limit 60", "--limits.timeout 60"),
        ("--log-dir out", "-o out"),
        ("--model-args pretrained=my/model,dtype=float32", "-m local:my/model"),
        ('--sampling-args {"temperature":0.2,"top_p":1}', "--sampling.temperature 0.2 --sampling.top_p 1"),
        ("-T level=3", "--taskset.level 3"),
        ("--temperature -1", "--sampling.temperature -1"),
    ],
)
def test_a_flag_of_habit_points_to_the_key_with_its_value(treetune, tmp_path, typed, meant):
    result = treetune("eval", "arithmetic", *typed.split(), "-m", "scripted:gold", "-n", 2)
    assert result.code == 2
    assert f"did you mean {meant}?" in result.err
    assert not list(tmp_path.iterdir())


def test_what_is_proposed_works(treetune):
    proposed = "--sampling.temperature 0.7 --sampling.extra.top_k 5 --taskset.level 3 -c 8 -r 2 --limits.max_turns 4"
    assert treetune("eval", "arithmetic", "-m", "scripted:gold", "-n", 2, *proposed.split(), "-o", "out").code == 0


def test_all_flags_are_told_at_once(treetune):
    error = treetune("eval", "arithmetic", "--temperature", 0.7, "--max-tokens", 9, "-n", 2).err
    assert "--sampling.temperature 0.7" in error
    assert "--sampling.max_tokens 9" in error


def test_a_seed_may_be_one_of_several_and_each_says_what_it_is_of(treetune):
    error = treetune("eval", "arithmetic", "--seed", 7, "-n", 2).err
    assert "--sampling.seed 7 (of the model) or --taskset.shuffle.seed 7 (of the order of tasks)" in error
    assert "--taskset.seed 7 (of the tasks themselves)" in error
    assert "--taskset.seed" not in treetune("eval", "reverse-text", "--seed", 7).err  # which has no such key


def test_a_key_on_the_command_line_is_never_shown(treetune):
    error = treetune("eval", "arithmetic", "--api-key", "sk-secret").err
    assert "--endpoint.api_key_env" in error
    assert "secret" not in error


def test_a_target_needs_no_flag(treetune):
    assert "treetune eval arithmetic" in treetune("eval", "--task", "arithmetic", "-m", "scripted:gold").err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("serve arithmetic --host 0.0.0.0", "--http 0.0.0.0:5000"),
        ("serve arithmetic --max-steps 4", "--limits.max_turns 4"),
        ("serve arithmetic --log-dir out", "--traces out"),
        ("show arithmetic --level 2", "--taskset.level 2"),
        ("show arithmetic --limit 2", "-n 2"),
        ("show arithmetic --temperature 1", "`treetune eval` has it: --sampling.temperature 1"),
        ("build arithmetic --output out", "--cache-dir out"),
        ("profile arithmetic --temperature 1", "--sampling.temperature 1"),
        ("audit arithmetic --base-url http://x", "--endpoint.base_url http://x"),
        ("train verl arithmetic --lr 0.1", "without dashes: lr=0.1"),
        ("train verl arithmetic --level 2", "--taskset.level 2"),
        ("eval arithmetic --model.temperature 2", "sampling.temperature"),
        ("eval arithmetic --smapling.temperature 2", "sampling.temperature"),
        ("eval arithmetic -m scripted:gold --sampling.top_k 5", "did you mean 'extra.top_k'?"),
        ("eval arithmetic -m scripted:gold --sampling.extra top_k", "expected"),
        ("run arithmetic", "did you mean 'eval'?"),
        ("ls", "no such command 'ls'; did you mean 'list'? (see `treetune --help`)"),
        ("evl arithmetic", "no such command 'evl'; did you mean 'eval'? (see `treetune --help`)"),
        ("xyzzy", "no such command 'xyzzy' (see `treetune --help`)"),
        ("--xyzzy", "o such option: --xyzzy"),
    ],
)
def test_every_verb_points_to_its_own(treetune, arguments, meant):
    result = treetune(*arguments.split())
    assert result.code == 2
    assert meant in result.err


def test_a_flag_without_any_meaning_is_told_plainly(treetune):
    assert "no such option: --xyzzy (see `treetune eval --help`)" in treetune("eval", "arithmetic", "--xyzzy").err


def test_no_habit_hides_a_flag_that_there_is():
    assert not {word for others in OTHER_VERBS.values() for word in others.split()} & VERBS.keys()
    assert OTHER_VERBS.keys() <= VERBS.keys()
    for verb in OVERRIDABLE:
        assert verb in get_command(make_app(verb)).commands


def test_the_version_is_told(treetune):
    assert treetune("--version").out.startswith("treetune 0.")
    assert treetune("-V").code == 0


def test_without_arguments_the_help_is_shown_and_nothing_is_an_error(treetune):
    shown = treetune()
    assert "Usage: treetune" in shown.out + shown.err
    assert "error" not in shown.err


def test_dotted_keys_beside_an_unknown_flag_are_not_called_unknown(treetune):
    told = treetune("eval", "arithmetic", "--sampling.top_p", 0.5, "--xyzzy", 1, "--endpoint.timeout", 3).err
    assert "no such option: --xyzzy" in told
    assert "--sampling.top_p" not in told
    assert "--endpoint.timeout" not in told
