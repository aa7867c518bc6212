"""Before an evaluation the endpoint is asked: what is wrong is said in words, and nothing is written."""

from __future__ import annotations

import socket

import pytest
from vendor_endpoint import vendor

from treetune.models import PROVIDERS, EndpointConfig, Provider, endpoint_of
from treetune.models.endpoint import check_endpoint


@pytest.fixture
def evaluate(treetune, tmp_path, monkeypatch):
    """An evaluation of a model at an address; where it is refused, there is no run folder."""
    for provider in PROVIDERS.values():
        for name in provider.keys:
            monkeypatch.delenv(name, raising=False)

    def run(model, url=None, *more):
        address = ("--endpoint.base_url", url) if url else ()
        result = treetune("eval", "reverse-text", "-m", model, "-n", 2, "-o", "run", *address, *more)
        assert (tmp_path / "run").exists() == (result.code in (0, 1)), result.err
        return result

    return run


def test_a_model_that_is_there_is_evaluated_and_only_listed_before(evaluate, tmp_path):
    with vendor(tmp_path, models=["small", "large"]) as server:
        assert evaluate("large", f"{server.url}/v1").code == 0
        assert len(server.asked("/models")) == 1
        assert len(server.asked("/chat/completions")) == 2


def test_a_dead_address_is_told_at_once(evaluate):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        result = evaluate("m", url)
    assert result.code == 3
    assert f"nothing answers at {url}: Connect" in result.err
    assert "--endpoint.base_url" in result.err


def test_a_host_that_there_is_not_is_named(evaluate):
    result = evaluate("m", "http://no-such-host.invalid:8000/v1")
    assert result.code == 3
    assert "there is no host 'no-such-host.invalid'" in result.err


def test_tls_where_there_is_none_is_told(evaluate, tmp_path):
    with vendor(tmp_path, models=["m"]) as server:
        result = evaluate("m", f"{server.url}/v1".replace("http:", "https:"))
    assert result.code == 3
    assert "write http://" in result.err


@pytest.mark.parametrize("wrong", ["", "/", "/v1/chat/completions"])
def test_a_missing_v1_is_put_right(evaluate, tmp_path, wrong):
    with vendor(tmp_path, models=["m"]) as server:
        result = evaluate("m", f"{server.url}{wrong}")
        assert result.code == 2
        assert f"write --endpoint.base_url {server.url}/v1\n" in result.err


def test_a_v1_too_many_is_put_right(evaluate, tmp_path):
    with vendor(tmp_path, models=["m"], prefix="") as server:
        result = evaluate("m", f"{server.url}/v1")
        assert result.code == 2
        assert f"write --endpoint.base_url {server.url}\n" in result.err


def test_an_address_without_http_is_told(evaluate):
    result = evaluate("m", "127.0.0.1:8000/v1")
    assert result.code == 2
    assert "begins with http:// or https://" in result.err


def test_a_wrong_name_gets_the_names_that_are_there(evaluate, tmp_path):
    with vendor(tmp_path, models=["Qwen/Qwen3-4B", "other"]) as server:
        result = evaluate("Qwen/Qwen3-8B", f"{server.url}/v1")
    assert result.code == 2
    assert "has no model 'Qwen/Qwen3-8B'; did you mean 'Qwen/Qwen3-4B'?" in result.err
    assert "it serves: Qwen/Qwen3-4B, other" in result.err


def test_a_name_that_is_not_listed_but_answered_to_is_taken(evaluate, tmp_path):
    with vendor(tmp_path, models=["alias", "dated"], listed=["dated"]) as server:
        assert evaluate("alias", f"{server.url}/v1").code == 0


def test_a_misspelt_name_that_a_server_answers_to_is_told(evaluate, tmp_path):
    with vendor(tmp_path, models=["small-modle", "small-model"], listed=["small-model", "small"]) as server:
        result = evaluate("small-modle", f"{server.url}/v1")
    assert result.code == 0
    assert "does not list 'small-modle', but answers to it; did you mean 'small-model'" in result.err


@pytest.mark.parametrize(
    ("sent", "told"), [(None, "requires a key, and none was sent"), ("wrong", "refuses the key in K")]
)
def test_a_missing_and_a_wrong_key_are_told_apart(evaluate, tmp_path, monkeypatch, sent, told):
    more = ("--endpoint.api_key_env", "K") if sent else ()
    monkeypatch.setenv("K", sent or "")
    with vendor(tmp_path, models=["m"], key="right") as server:
        result = evaluate("m", f"{server.url}/v1", *more)
        assert result.code == 2
        assert told in result.err
        monkeypatch.setenv("K", "right")
        assert evaluate("m", f"{server.url}/v1", "--endpoint.api_key_env", "K").code == 0


@pytest.mark.parametrize("guarded", [False, True])
def test_an_endpoint_that_lists_no_models_is_no_worse(evaluate, tmp_path, guarded):
    with vendor(tmp_path, guarded=guarded) as server:
        assert evaluate("m", f"{server.url}/v1").code == 0


def test_a_key_that_may_not_list_models_may_still_use_one(evaluate, tmp_path, monkeypatch):
    monkeypatch.setenv("K", "right")
    with vendor(tmp_path, models=["m"], key="right", list_header="X-Admin") as server:
        assert evaluate("m", f"{server.url}/v1", "--endpoint.api_key_env", "K").code == 0


def test_it_can_be_left_out_and_scripts_need_none(evaluate, tmp_path):
    with vendor(tmp_path, models=["m"]) as server:
        evaluate("x", f"{server.url}/v1", "--endpoint.preflight", "false", "--endpoint.max_retries", 0)
        assert server.asked("/models") == []
    assert not (tmp_path / "requests.jsonl").read_text().count("GET")


def test_a_server_that_says_nothing_is_given_its_chance(tmp_path):
    """It may only be busy: what it does is seen when it is used."""
    with vendor(tmp_path, models=["m"], silent=True) as server:
        check_endpoint("m", EndpointConfig(base_url=f"{server.url}/v1"))


@pytest.mark.parametrize("verb", [("profile",), ("audit",), ("eval", "--serve", "1")])
def test_every_verb_that_plays_a_model_asks_first(treetune, tmp_path, verb):
    with vendor(tmp_path, models=["there"]) as server:
        at = ("--endpoint.base_url", f"{server.url}/v1")
        result = treetune(verb[0], "reverse-text", *verb[1:], "-m", "absent", "-n", 1, *at)
    assert result.code == 2
    assert "it serves: there" in result.err


def test_several_models_are_all_asked_for_before_the_first_is_played(treetune, tmp_path):
    with vendor(tmp_path, models=["there"]) as server:
        at = ("--endpoint.base_url", f"{server.url}/v1")
        result = treetune("eval", "reverse-text", "-m", "there", "-m", "absent", "-n", 1, "-o", "run", *at)
        assert result.code == 2
        assert not [request for request in server.asked("/completions") if request["body"]["model"] == "there"]
    assert not (tmp_path / "run").exists()


# Vendors


@pytest.mark.parametrize("prefix", ["anthropic", "gemini", "openrouter", "together"])
def test_a_vendors_model_is_named_by_its_prefix(evaluate, tmp_path, monkeypatch, prefix):
    name = "org/model-1" if prefix in ("openrouter", "together") else "model-1"
    listed = [f"models/{name}"] if prefix == "gemini" else [name]
    header = "x-api-key" if prefix == "anthropic" else "Authorization"
    with vendor(tmp_path, models=[name], listed=listed, key="secret", list_header=header) as server:
        variable = PROVIDERS[prefix].keys[0]
        monkeypatch.setitem(PROVIDERS, prefix, Provider(f"{server.url}/v1", PROVIDERS[prefix].keys))
        missing = evaluate(f"{prefix}/{name}")
        assert missing.code == 2
        assert f"the environment variable {variable} is not set" in missing.err
        monkeypatch.setenv(variable, "wrong")
        wrong = evaluate(f"{prefix}/{name}")
        assert wrong.code == 2
        assert f"refuses the key in {variable}" in wrong.err
        monkeypatch.setenv(variable, "secret")
        unknown = evaluate(f"{prefix}/model-9")
        assert unknown.code == 2
        assert "did you mean" in unknown.err or "it serves" in unknown.err
        assert evaluate(f"{prefix}/{name}", None, "--json").json["mean_reward"] == 0.0
        played = server.asked("/chat/completions")[-1]
        assert played["body"]["model"] == name
        assert played["headers"]["Authorization"] == "Bearer secret"


def test_openai_is_a_vendor_too():
    name, endpoint = endpoint_of("openai/gpt-5", EndpointConfig())
    assert (name, endpoint.base_url, endpoint.key_variable) == ("gpt-5", EndpointConfig().base_url, "OPENAI_API_KEY")


def test_a_prefix_is_only_a_name_where_an_address_is_given(evaluate, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with vendor(tmp_path, models=["openai/gpt-oss-20b"]) as server:
        assert evaluate("openai/gpt-oss-20b", f"{server.url}/v1").code == 0
        assert "secret" not in str(server.asked())


def test_the_second_variable_of_a_vendor_is_taken_where_only_it_is_set(monkeypatch):
    monkeypatch.delenv("GEMINI_API_KEY", raising=False)
    monkeypatch.setenv("GOOGLE_API_KEY", "x")
    assert PROVIDERS["gemini"].key_variable == "GOOGLE_API_KEY"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("hf/Qwen3", "did you mean 'huggingface/Qwen3'?"),
        ("vllm/Qwen/Qwen3", "did you mean 'vllm:Qwen/Qwen3'?"),
        ("antropic/claude", "did you mean 'anthropic'?"),
        ("Qwen/Qwen3-0.6B", "or vllm:Qwen/Qwen3-0.6B, which starts it"),
    ],
)
def test_a_name_that_no_vendor_has_is_not_asked_of_openai(evaluate, monkeypatch, model, said):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    result = evaluate(model)
    assert result.code == 2
    assert said in result.err
    assert "OPENAI_API_KEY" not in result.err
