# SPDX-License-Identifier: Apache-2.0
"""`tune`: functions as kernels; their properties, their configurations, and refused functions."""

from __future__ import annotations

import functools
import inspect
import json
import os
import pickle
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests import forked
from tests.ops.sample_kernels import told_apart

from ejkernel.ops import (
    Autotuner,
    ConfigError,
    ConfigKey,
    ConfigSelectorChain,
    ConfigSpace,
    Invocation,
    Kernel,
    KernelError,
    PersistentCache,
    autotune,
    default_executor,
    find_labels_in_lowered,
    overlay_cache,
    policy_override,
    tune,
    vmap_with_config,
)
from ejkernel.ops.core.kernel import candidates_of
from ejkernel.ops.errors import (
    ArgumentError,
    CacheWarning,
    CallError,
    TuningError,
    UnstableKeyError,
    UnstableKeyWarning,
)
from ejkernel.ops.execution.discovery import discover

X = np.linspace(0.0, 1.0, 16, dtype=np.float32)
SPACE = {"rows": [1, 2, 4], "cols": [8, 16]}


@tune(space=SPACE)
def shows(x, scale=1.0, *, rows=2, cols=8):
    """Its result is its configuration."""
    return 0 * x.sum() + scale * (100 * rows + cols)


def shown(**arguments):
    return int(shows(X, **arguments))


def explained(*args, **kwargs):
    why = default_executor().explain(*args, **kwargs)
    return why.config, why.source


def listed(kernel, *args, **kwargs):
    args, kwargs = kernel.prepare(*args, **kwargs)
    return list(candidates_of(kernel, Invocation(kernel=kernel, args=args, kwargs=kwargs)))


def made(function, **options):
    return tune(**{"space": {"rows": [1, 2]}} | options)(function)


def rows_only(x, *, rows=1):
    return told_apart(x * 1.0, rows)


# --- properties of the kernel ---


def test_a_tuned_function_is_a_kernel_that_looks_like_the_function():
    assert isinstance(shows, Kernel)
    assert (shows.__name__, shows.__doc__, shows.__module__) == ("shows", "Its result is its configuration.", __name__)
    assert shows.__wrapped__(X) == 208
    assert str(inspect.signature(shows)) == "(x, scale=1.0, *, rows=2, cols=8)"


def test_its_operation_has_its_name_and_version():
    assert (shows.op_id_v, made(rows_only, name="other", version="7").op_id_v) == ("shows@v0", "other@v7")


def test_every_function_has_its_own_hooks():
    first, second = made(lambda x, *, rows=1: x, name="a"), made(lambda x, *, rows=1: x, name="b", reference=jnp.sin)
    assert "reference" not in vars(type(first))
    assert second.reference(0.0) == 0.0


def test_a_keyword_for_a_positional_argument_is_the_same_call():
    keys = {Invocation(kernel=shows, args=args, kwargs=kw).call_key for args, kw in [((X,), {}), ((), {"x": X})]}
    assert len(keys) == 1


# --- which configuration a call gets ---


def test_an_untuned_call_runs_with_the_defaults():
    assert (shown(), explained(shows, X)) == (208, ({"rows": 2, "cols": 8}, "heuristic"))


@pytest.mark.parametrize("call", [shown, lambda **kw: int(jax.jit(lambda x: shows(x, **kw))(X))], ids=["eager", "jit"])
def test_a_call_with_all_tunable_arguments_overrides_only_itself(call):
    assert call(rows=4, cols=3) == 403  # 3 is not a value of the space
    assert call() == 208


def test_an_override_has_the_key_of_the_plain_call_and_is_not_remembered():
    shown(rows=4, cols=16)
    assert explained(shows, X, rows=4, cols=16) == ({"rows": 4, "cols": 16}, "override")
    assert explained(shows, X)[1] == "heuristic"
    labels = [find_labels_in_lowered(jax.jit(functools.partial(shows, **kw)).lower(X)) for kw in ({}, shows_all())]
    assert labels[0] == labels[1] != []


def shows_all():
    return {"rows": 4, "cols": 16}


def test_a_call_that_gives_some_has_the_heuristic_s_for_the_rest():
    assert (shown(rows=4), explained(shows, X, rows=4)) == (408, ({"rows": 4, "cols": 8}, "heuristic"))


def test_a_call_with_some_tunable_arguments_is_a_separate_call():
    executor = default_executor()
    plain, fixed, other = (executor.explain(shows, X, **kw).key for kw in ({}, {"rows": 4}, {"rows": 1}))
    assert len({plain, fixed, other}) == 3
    with overlay_cache({plain: {"rows": 1, "cols": 16}}):
        assert (shown(), shown(rows=4)) == (116, 408)
    with overlay_cache({fixed: {"rows": 4, "cols": 16}}):
        assert (shown(), shown(rows=4)) == (208, 416)


def test_given_tunable_arguments_are_fixed_in_all_candidates():
    assert listed(shows, X, rows=4) == [{"rows": 4, "cols": 8}, {"rows": 4, "cols": 16}]
    assert listed(shows, X, rows=32) == [{"rows": 32, "cols": 8}, {"rows": 32, "cols": 16}]


def test_cfg_and_arguments_may_agree_but_not_differ():
    assert shown(rows=4, cfg={"rows": 4, "cols": 16}) == 416
    with pytest.raises(ConfigError, match=r"cfg is .*'rows': 1.* but the call passes {'rows': 4}"):
        shown(rows=4, cfg={"rows": 1, "cols": 16})
    with pytest.raises(ConfigError, match=r"cfg is .*'cols': 16.* but the arguments give .*'cols': 8"):
        shown(rows=1, cols=8, cfg={"rows": 1, "cols": 16})


def test_a_heuristic_sees_the_call_and_fills_in_for_the_defaults():
    kernel = made(lambda x, *, rows, cols=8: 0 * x.sum() + 100 * rows + cols, name="h", space=SPACE,
                  heuristic=lambda inv: {"rows": inv.args[0].shape[0] // 4})  # fmt: skip
    assert (int(kernel(X)), int(kernel(X[:8], cols=1)), int(kernel(X, rows=3))) == (408, 201, 308)


def test_autotune_finds_the_best_and_the_next_call_runs_with_it():
    best = autotune(cubed, X, num_iters=1)
    assert set(best) == {"rows"}
    assert explained(cubed, X) == (best, "autotune")
    np.testing.assert_allclose(cubed(X, **best), X**3, rtol=1e-6)


def test_a_call_with_all_tunable_arguments_is_not_tuned():
    with pytest.raises(ArgumentError, match="the call fixes its whole configuration"):
        autotune(shows, X, rows=1, cols=8)


def test_other_arguments_are_static_or_arrays_as_usual():
    @made
    def scaled(x, *, by, power=1, rows=1):
        return x**power * by * rows

    assert float(scaled(np.float32(3), by=jnp.float32(2), power=2)) == 18.0
    assert float(jax.grad(lambda b: scaled(np.float32(3), by=b))(2.0)) == 3.0


def test_functions_without_a_module_can_be_tuned_and_be_static_arguments():
    found = {}
    exec("def of_a_text(x, function=None, *, rows=2):\n    return x * rows", found)
    kernel = tune(found["of_a_text"], space={"rows": [2, 3]})
    assert float(kernel(1.0)) == 2
    with pytest.warns(UnstableKeyWarning, match="has no name that is the same in every process"):
        assert float(kernel(1.0, found["of_a_text"])) == 2


def test_functions_of_any_signature_can_be_tuned():
    @made
    def added(first, /, *more, rows=1, **named):
        return rows * (first + sum(more) + sum(named.values()))

    assert float(added(jnp.ones(()), 2.0, 3.0, a=jnp.ones(()), rows=2)) == 14.0


# --- spaces ---

FORMS = {
    "values": {"space": {"rows": [1, 2, 4]}},
    "keys": {"space": {"rows": {1: "one", 2: "two", 4: "four"}.keys()}},
    "constraints": {"space": {"rows": [1, 2, 3, 4]}, "constraints": lambda rows: rows != 3},
    "values by shape": {"space": {"rows": lambda inv: [n for n in (1, 2, 3, 4) if inv.args[0].shape[0] % n == 0]}},
    "ConfigSpace": {"space": ConfigSpace({"rows": [1, 2, 4]})},
    "list": {"space": [{"rows": 1}, {"rows": 2}, {"rows": 4}]},
    "function to values": {"space": lambda inv: {"rows": [1, 2, 4]}},
    "function to ConfigSpace": {"space": lambda inv: ConfigSpace({"rows": [1, 2, 4]})},
    "function to list": {"space": lambda inv: [{"rows": inv.args[0].shape[0] // n} for n in (16, 8, 4)]},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_space_has_many_forms(form):
    assert listed(made(rows_only, **FORMS[form]), X) == [{"rows": 1}, {"rows": 2}, {"rows": 4}]


@pytest.mark.parametrize("values", [[], (), range(0)])
def test_an_axis_without_values_is_an_error_even_with_a_heuristic(values):
    with pytest.raises(KernelError, match=r"space\['rows'\] must have at least one value, got .*e.g. \[64, 128\]"):
        made(rows_only, space={"rows": values}, heuristic=lambda inv: {"rows": 1})


def test_values_are_searched_rather_than_listed():
    assert isinstance(candidates_of(shows, Invocation(kernel=shows, args=(X,))), ConfigSpace)


def test_an_entry_of_a_list_may_omit_values_of_the_heuristic():
    kernel = made(lambda x, *, rows=1, cols=5: x, name="l", space=[{"rows": 2}, {"cols": 6}])
    assert listed(kernel, X) == [{"rows": 2, "cols": 5}, {"rows": 1, "cols": 6}]
    assert listed(kernel, X, cols=6) == [{"rows": 2, "cols": 6}, {"rows": 1, "cols": 6}]
    assert listed(kernel, X, rows=1) == [{"rows": 1, "cols": 6}]


def test_given_arguments_narrow_a_config_space():
    space = ConfigSpace(SPACE, constraints=lambda rows, cols: rows * cols <= 32)
    kernel = made(lambda x, *, rows=1, cols=8: x, name="n", space=space)
    assert listed(kernel, X, cols=16) == [{"rows": 1, "cols": 16}, {"rows": 2, "cols": 16}]
    assert listed(kernel, X, cols=3) == [{"rows": 1, "cols": 3}]


@pytest.mark.parametrize(
    "options",
    [
        {"space": {"rows": lambda inv: []}},
        {"space": {"rows": lambda inv: [1, 2]}, "constraints": lambda rows: rows > 4},
        {"space": lambda inv: []},
    ],
)
def test_the_heuristic_is_the_only_candidate_if_all_others_fail(options):
    kernel = made(lambda x, *, rows=7, cols=8: x, name="none", **options)
    assert [config["rows"] for config in listed(kernel, X)][:1] == [7]


def test_constraints_that_reject_every_configuration_of_all_calls_are_an_error():
    with pytest.raises(ConfigError, match=r"^none: no configuration .* Of 6 configurations, .* rejects 6"):
        made(lambda x, *, rows=7, cols=8: x, name="none", space=SPACE, constraints=lambda rows: rows > 4)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"version": 3}, "^named: version must be a string"),
        ({"constraints": 5}, "^named: constraints must be"),
        ({"reference": 5}, "^named: reference must be a function"),
        ({"space": None}, "^named: tune needs the values"),
        ({"space": {"cols": [1]}}, "^named: space names 'cols', but its function has no such parameter"),
    ],
)
def test_errors_name_a_kernel_by_its_given_name(options, text):
    with pytest.raises((KernelError, ConfigError, ArgumentError), match=text):
        tune(lambda x, *, rows=1: x, **{"space": {"rows": [1]}, **options}, name="named")
    kernel = tune(lambda x, *, rows=1: x, space={"rows": [1]}, name="named")
    with pytest.raises(ConfigError, match=r"^named: rows must be of type int"):
        kernel(X, rows="one")


def test_the_reference_is_called_without_tunable_arguments():
    wrong = made(lambda x, *, rows=1: x * (1 if rows == 1 else 2), name="w", reference=lambda x: x, space=[{"rows": 2}])
    with pytest.warns(match="the only candidate beside the heuristic was rejected; it is rows=2, wrong"):
        assert autotune(wrong, X) == {"rows": 1}


# --- values ---


@pytest.mark.parametrize("value", [3, "a", True, None, 2.5, (1, (2, 3))])
def test_a_value_reaches_the_function_as_the_next_process_would_find_it(value):
    seen = []
    kernel = made(lambda x, *, option=1: seen.append(option) or x * 1, name="v", space={"option": [1, value, [4]]})
    key = Invocation(kernel=kernel, args=(X,)).key
    with overlay_cache({key: json.loads(json.dumps({"option": value}))}):
        kernel(X)
    assert (seen[-1], type(seen[-1])) == (value, type(value))


def test_numbers_of_numpy_are_python_s():
    kernel = made(rows_only, space={"rows": 2 ** np.arange(3)})
    assert [type(config["rows"]) for config in listed(kernel, X)] == [int] * 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rows": "4"}, "shows: rows must be of type int, as its other values are; got '4'"),
        ({"rows": True}, "shows: rows must be of type int, .* got True"),
        ({"rows": None}, "shows: rows must be of type int, .* got None"),
        ({"rows": jnp.float32}, "shows: rows must be a number, a text, .* for a dtype or an enum pass its name"),
        ({"rows": float("nan")}, "shows: rows must be a number, .* got nan"),
        ({"cfg": {"rows": 4}}, "shows: cfg must be a dictionary with rows, cols; got {'rows': 4}"),
        ({"cfg": {"rows": 4, "cols": 8, "more": 1}}, "cfg must be a dictionary with rows, cols; got"),
        ({"cfg": 4}, "cfg must be a dictionary with rows, cols; got 4"),
        ({"cfg": {"rows": 4, "cols": "8"}}, "cols must be of type int, .* got '8'"),
    ],
)
def test_a_bad_value_is_refused(arguments, text):
    with pytest.raises(ConfigError, match=text):
        shows(X, **arguments)


def test_a_traced_value_is_refused():
    with pytest.raises(ConfigError, match=r"rows must be a number, .* a traced value, int32\[\], .* static_argnames"):
        jax.jit(lambda n: shows(X, rows=n))(3)


def test_an_unknown_argument_is_refused():
    with pytest.raises(TypeError, match="shows has no argument `row`; did you mean `rows=`"):
        shows(X, row=3)


# --- declarations ---


@pytest.mark.parametrize("written", ["@tune", "@tune()"])
def test_a_decorator_without_a_space_says_how_to_write_it(written):
    def bare(x, *, rows=1):
        return x

    with pytest.raises(KernelError, match=r'write @tune\(space=\{"rows": \[8, 16\]\}\)'):
        tune(bare) if written == "@tune" else tune()(bare)


def test_a_misspelt_parameter_of_the_space_gets_a_suggestion():
    def total(x, *, rows=1):
        return x

    with pytest.raises(KernelError, match=r"names 'row', but its function has no .*; did you mean 'rows'\?"):
        tune(total, space={"row": [1, 2]})


def test_an_unknown_argument_of_tune_gets_a_suggestion():
    with pytest.raises(CallError, match=r"^tune has no argument `search_space`; use `space=`"):
        tune(search_space={"rows": [1]})
    with pytest.raises(CallError, match=r"^tune has no argument `constraint`; did you mean `constraints=`"):
        tune(rows_only, space={"rows": [1]}, constraint=bool)


def test_an_error_of_the_function_notes_the_configuration_and_the_shapes():
    def total(x, *, rows=3):
        return x.reshape(rows, -1).sum(0)

    with pytest.raises(TypeError) as raised:
        tune(total, space={"rows": [1, 2]})(jnp.ones((2, 4)))
    assert raised.value.__notes__[0] == "total ran with rows=3 for float32[2,4]."
    with pytest.raises(TuningError, match=r"evenly divide 8 \(again ran with rows=3 for float32\[2,4\]\.\)"):
        autotune(tune(total, space={"rows": [1, 2]}, name="again"), jnp.ones((2, 4)))


@pytest.mark.parametrize(
    ("function", "options", "text"),
    [
        (lambda x, *, rows: x, {}, "rows must have a default, which untuned calls run with; or pass .*heuristic"),
        (lambda x: x, {}, "space names 'rows', but its function has no such parameter; its parameters are x"),
        (lambda rows, /: rows, {}, "space names 'rows', which must be a parameter that can be passed by keyword"),
        (lambda x, rows, y: x, {}, "rows must come after all arguments that are not tunable"),
        (lambda x, *, rows=1, cfg=None: x, {}, "rename the parameter cfg"),
        (lambda x, *, rows=jnp.float32: x, {}, "the default of rows must be a number"),
        (lambda x, *, rows=1: x, {"space": {"rows": [jnp.float32]}}, "a value of rows must be a number"),
        (lambda x, *, rows=1: x, {"space": {"rows": "abc"}}, r"space\['rows'\] must be a sequence of values"),
        (lambda x, *, rows=1: x, {"space": {"rows": b"ab"}}, r"space\['rows'\] must be a sequence of values"),
        (lambda x, *, rows=1: x, {"space": {"rows": {1, 2}}}, r"space\['rows'\] must be a sequence of values"),
        (lambda x, *, rows=1: x, {"name": ""}, "^bad: name must be ASCII letters, .* got ''; .*version="),
        (lambda x, *, rows=1: x, {"space": 3}, "space must be values by name, a ConfigSpace, .* got 3"),
        (lambda x, *, rows=1: x, {"space": {}}, "space must name at least one tunable argument"),
        (lambda x: x, {"space": lambda inv: []}, "space must name at least one tunable argument"),
        (
            lambda x, *, rows=1: x,
            {"space": [{"rows": 1}], "constraints": lambda rows: True},
            "constraints need a space",
        ),
        (functools.partial(rows_only), {}, "has no usable name; pass .*name="),
        (3, {}, "tune decorates a function, got 3"),
    ],
)
def test_a_bad_declaration_is_refused(function, options, text):
    if hasattr(function, "__name__"):
        function.__name__ = "bad"
    with pytest.raises((KernelError, ConfigError), match=text):
        made(function, **options)


def test_a_space_of_other_names_is_refused_when_it_is_asked_for():
    kernel = made(lambda x, *, rows=1, causal=False: x, name="c", space=lambda inv: {"rows": [1]})
    with pytest.raises(
        ConfigError,
        match=r"for the tunable arguments rows, causal; got .* every keyword-only parameter",
    ):
        listed(kernel, X)


def test_a_heuristic_must_return_parameters_without_defaults():
    kernel = made(lambda x, *, rows: x, name="u", heuristic=lambda inv: {})
    with pytest.raises(ConfigError, match="the result of heuristic, with the defaults, must be a dictionary with rows"):
        kernel(X)


def test_a_trailing_parameter_becomes_keyword_only():
    kernel = made(lambda x, rows=1: x * rows, name="t")
    assert str(inspect.signature(kernel)) == "(x, *, rows=1)"
    with pytest.raises(TypeError, match=r"t takes 1 argument by position .x., got 2"):
        kernel(X, 2)


# --- under JAX's transformations ---


@tune(space={"rows": [1, 2]})
def cubed(x, *, rows=1):
    return told_apart(x**3, rows)


def test_a_tuned_function_is_differentiated_and_batched_as_the_function():
    x = jnp.arange(3.0)
    np.testing.assert_allclose(jax.grad(lambda x: cubed(x).sum())(x), 3 * x**2)
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(cubed)))(x), 3 * x**2)
    np.testing.assert_allclose(jax.jvp(cubed, (x,), (x,))[1], 3 * x**3)
    np.testing.assert_allclose(vmap_with_config(cubed)(x, rows=2), x**3)


def test_a_gradient_rule_inside_the_function_holds():
    @jax.custom_vjp
    def rule(x):
        return x

    rule.defvjp(lambda x: (x, None), lambda _, ct: (7 * ct,))
    kernel = made(lambda x, *, rows=1: rule(x) * rows, name="ruled")
    assert float(jax.jit(jax.grad(kernel))(1.0)) == 7.0


# --- other processes ---


def test_a_tuned_function_is_pickled_by_name():
    assert pickle.loads(pickle.dumps(shows)) is shows


def test_a_local_function_cannot_be_pickled():
    with pytest.raises((pickle.PicklingError, AttributeError), match=r"local.*inner"):
        pickle.dumps(local())


def local():
    @made
    def inner(x, *, rows=1):
        return x

    return inner


def test_a_tuned_function_may_be_a_static_argument_of_another_kernel():
    assert Invocation(op_id="outer", args=(X, shows)).call_key == Invocation(op_id="outer", args=(X, shows)).call_key
    with pytest.raises(UnstableKeyError):
        _ = Invocation(op_id="outer", args=(X, local())).call_key


MODULE = """
    import jax.numpy as jnp
    from ejkernel.ops import tune

    @tune(space={"rows": [1, 2, 4], "tile": [(8, 8), (16, 8)]})
    def total(x, *, rows=1, tile=(8, 8)):
        assert isinstance(tile, tuple)
        return x.sum() * rows * tile[0]
"""
TELL = """
    import numpy as np, module, json
    from ejkernel.ops import default_executor
    why = default_executor().explain(module.total, np.ones(4, np.float32))
    print(json.dumps([why.config, why.source, float(module.total(np.ones(4, np.float32)))]))
"""


def run_in(folder, code):
    done = forked.python(folder, "-c", textwrap.dedent(code), EJKERNEL_CACHE_DIR=os.environ["EJKERNEL_CACHE_DIR"])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_another_process_runs_with_the_tuned_configuration(tmp_path):
    (tmp_path / "module.py").write_text(textwrap.dedent(MODULE))
    put = """
        import numpy as np, module
        from ejkernel.ops import default_executor
        key = default_executor().explain(module.total, np.ones(4, np.float32)).key
        default_executor().chooser.remember(key, {"rows": 4, "tile": (16, 8)})
    """
    run_in(tmp_path, put)
    assert json.loads(run_in(tmp_path, TELL)) == [{"rows": 4, "tile": [16, 8]}, "persistent", 256.0]


def test_an_entry_of_an_older_form_of_the_function_is_a_miss_with_a_warning(tmp_path):
    persistent = PersistentCache(tmp_path)
    chain = ConfigSelectorChain(persistent=persistent)
    inv = Invocation(kernel=shows, args=(X,))
    persistent.put(inv.key, {"rows": 4})
    with pytest.warns(
        CacheWarning, match="shows: its entry in the persistent cache must be a dictionary with rows, cols"
    ):
        assert chain.resolve(inv, shows).source == "heuristic"


def test_a_miss_is_tuned_where_the_policy_allows_it():
    chain = default_executor().chooser
    chain.tuner = Autotuner(rounds=1)
    with policy_override(autotune=True):
        jax.jit(cubed)(X)
    key = Invocation(kernel=cubed, args=(X,)).key
    assert isinstance(key, ConfigKey)
    assert chain.cache.remembered(key).source == "autotune"


@pytest.mark.slow
def test_a_worker_process_tunes_a_tuned_function(tmp_path):
    (tmp_path / "module.py").write_text(textwrap.dedent(MODULE))
    tell = """
        import numpy as np, module, json
        from ejkernel.ops import AutotunePolicy, Autotuner, Invocation
        inv = Invocation(kernel=module.total, args=(np.ones(4, np.float32),), kwargs={"tile": (8, 8)})
        if __name__ == "__main__":
            policy = AutotunePolicy(isolate=True, validate=False)
            tuned = Autotuner(rounds=1).tune(inv, module.total, policy=policy)
            print(json.dumps([outcome.status for outcome in tuned.outcomes]))
    """
    assert json.loads(run_in(tmp_path, tell)) == ["measured"] * 3


# --- forward and backward, each with its own ---


@tune(space={"rows": [1, 2]}, bwd_space={"cols": [8, 16]}, bwd_heuristic=lambda inv: {"cols": 16})
def directed(x, *, rows=2, cols=8):
    return told_apart(x * 1.0, 100 * rows + cols)


def directions(kernel):
    found = discover(jax.value_and_grad(lambda x: kernel(x).sum()), X)
    return {inv.direction: list(candidates_of(kernel, inv)) for inv in found}


def test_forward_and_backward_have_separate_spaces():
    assert directions(directed) == {
        "fwd": [{"rows": 1, "cols": 8}, {"rows": 2, "cols": 8}],
        "bwd": [{"rows": 2, "cols": 8}, {"rows": 2, "cols": 16}],
    }


def test_constraints_see_the_heuristic_s_values_of_the_other_direction_rather_than_the_defaults():
    kernel = made(
        lambda x, *, rows=2, cols=8: told_apart(x * 1.0, 100 * rows + cols),
        name="constrained",
        space={"rows": [4, 16]},
        bwd_space={"cols": [8, 16]},
        constraints=lambda rows, cols: rows * cols >= 64,
        heuristic=lambda inv: {"rows": 16},
    )
    assert directions(kernel)["bwd"] == [{"rows": 16, "cols": 8}, {"rows": 16, "cols": 16}]


def test_a_backward_with_its_own_heuristic_does_not_follow_its_forward():
    forward, backward = discover(jax.value_and_grad(lambda x: directed(x).sum()), X)
    chain = ConfigSelectorChain()
    chain.remember(forward.key, {"rows": 1, "cols": 8})
    assert chain.choose(backward, directed) == {"rows": 2, "cols": 16}


def test_a_backward_without_one_follows_its_forward():
    kernel = made(rows_only, name="follows", bwd_space={"rows": [2]})
    forward, backward = discover(jax.value_and_grad(lambda x: kernel(x).sum()), X)
    chain = ConfigSelectorChain()
    chain.remember(forward.key, {"rows": 2})
    assert chain.choose(backward, kernel) == {"rows": 2}


# --- functions that others wrote ---


def theirs(x, rows=2, scale=1.0):
    return scale * told_apart(x * 1.0, rows)


def test_a_function_from_elsewhere_is_wrapped_in_one_call():
    kernel = tune(theirs, space={"rows": [1, 2]}, name="theirs")
    assert int(kernel(X, scale=3.0)[0]) == int(theirs(X, 2, 3.0)[0])
    assert str(inspect.signature(kernel)) == "(x, *, rows=2, scale=1.0)"


def test_example_inputs_are_positional_arguments_or_all_of_them():
    inv = Invocation(kernel=shows, args=(X,))
    for answer in (X, (X,), [X], ((X,), {})):
        kernel = made(rows_only, name="examples", example_inputs=lambda inv, rng, answer=answer: answer)
        args, kwargs = kernel.example_inputs(inv, np.random.default_rng(0))
        assert np.array_equal(args[0], X)
        assert kwargs == {}


def test_the_decorator_takes_keeps_residuals():
    assert made(rows_only, name="keeps", keeps_residuals=True).keeps_residuals
    assert not made(rows_only, name="keeps_not").keeps_residuals


def test_a_decorator_without_parentheses_is_an_error_with_the_fix():
    with pytest.raises(KernelError, match=r"^theirs: tune needs the values .* write @tune\(space="):
        tune(theirs)
