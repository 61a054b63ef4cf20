"""--reward module:function: what is imported, and what is refused before anything is loaded."""

import pytest

from qerl import data


def test_a_reward_of_the_users_own_is_imported(tmp_path, monkeypatch):
    source = "def short(completions, answer, **kwargs):\n    return [1.0]\nNAME = 'x'\n"
    (tmp_path / "my_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert data.load_reward("my_rewards:short")(["a"], ["b"]) == [1.0]
    with pytest.raises(ValueError, match="is a str, which cannot be called"):
        data.load_reward("my_rewards:NAME")


REWARDS = """
import functools
def narrow(completions, answer): ...
def other_column(completions, solution, **kwargs): ...
def wide(completions, answer, **kwargs): ...
async def later(completions, **kwargs): ...
weighed = functools.partial(wide, weight=2)
class Called:
    def __call__(self, **kwargs): ...
called = Called()
"""


def test_a_reward_must_take_what_trl_gives_it(tmp_path, monkeypatch):
    (tmp_path / "shaped_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("wide", "later", "weighed", "called"):
        assert callable(data.load_reward(f"shaped_rewards:{name}"))
    for name, said in (("narrow", "unexpected keyword argument"), ("other_column", "'solution'")):
        with pytest.raises(ValueError, match=f"{said}.*write it as .completions, answer, ..kwargs"):
            data.load_reward(f"shaped_rewards:{name}")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def short(:", "SyntaxError: invalid syntax"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'. It must be on"),
    ],
)
def test_whatever_a_reward_module_raises_is_said_in_one_line(source, said, tmp_path, monkeypatch):
    (tmp_path / "bad_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError) as refused:
        data.load_reward("bad_rewards:short")
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("json:no_such_function", "no_such_function"),
        ("json", "module:function"),
        (":f", "module:function"),
        ("json:", "module:function"),
    ],
)
def test_a_reward_that_cannot_be_imported_is_refused(path, reason):
    with pytest.raises(ValueError, match=reason):
        data.load_reward(path)
