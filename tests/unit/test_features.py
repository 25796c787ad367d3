import dataclasses

import pytest

from megatron_ext import config, features, tables
from megatron_ext.compositions import STOCK_OPTIONS, UNTESTED, WORKS
from megatron_ext.features import FEATURES, Feature
from megatron_ext.patching import Patch
from megatron_ext.rules import run
from tests.unit.stock_args import gpt


@dataclasses.dataclass(kw_only=True)
class FastConfig:
    """Flags of the feature under test."""

    fast_mode: str = "off"
    """How fast."""


def fast_needs_even_layers(args):
    if args.num_layers % 2 == 0:
        return None
    return f"--fast-mode {args.fast_mode} needs an even --num-layers, but it is {args.num_layers}."


def patch(feature):
    return Patch("json:dumps", lambda original: original, "wrap", "a test", feature)


STOCK_WORKS = {option.name: WORKS for option in STOCK_OPTIONS}

FAST = Feature(
    name="fast",
    title="Fast",
    what="goes faster",
    status="ready",
    config=FastConfig,
    enabled=lambda flags: flags.fast_mode != "off",
    rules=(fast_needs_even_layers,),
    patches=lambda context: [patch("fast")],
    groups=lambda args: {"fast": [(0, 1)]},
    checks=("bytes",),
    conflicts=STOCK_WORKS
    | {"pp": "no stages. Set --pipeline-model-parallel-size 1.", "moe": UNTESTED, "dense": "Keep one."},
    cpu="it needs a GPU kernel. Run without --cpu.",
    doc="docs/fast.md",
)  # fmt: skip
DENSE = Feature(
    name="dense",
    title="Dense",
    what="is dense",
    status="ready",
    enabled=lambda flags: flags.spec == ["dense"],
    stock_flags=("--spec",),
    patches=lambda context: [patch("dense")],
    conflicts=STOCK_WORKS,
)
LATER = Feature(name="later", title="Later", what="comes later", status="planned")
TABLE = (FAST, DENSE, LATER)


def flags(*argv, table=TABLE):
    return config.preparse(argv, features.configs(table), features.stock_flags(table))


def test_flags_of_every_feature_are_read():
    assert features.configs(TABLE) == [config.RunConfig, FastConfig]
    assert features.stock_flags(TABLE) == ["--spec"]
    assert flags("--fast-mode", "very", "--num-layers", "2").fast_mode == "very"


def test_enabled_features():
    assert features.enabled_features(flags(), TABLE) == []
    assert features.enabled_features(flags("--fast-mode", "very"), TABLE) == [FAST]
    assert features.enabled_features(flags("--spec", "dense", "--fast-mode", "x"), TABLE) == [FAST, DENSE]


def test_planned_feature_is_never_on():
    always = dataclasses.replace(LATER, enabled=lambda namespace: True)
    assert features.enabled_features(flags(), (always,)) == []


def test_rules_of_a_feature():
    assert run(gpt(num_layers=8), FAST.rules) == []
    args = gpt(num_layers=7)
    args.fast_mode = "very"
    assert run(args, FAST.rules) == ["--fast-mode very needs an even --num-layers, but it is 7."]


def test_conflict_with_a_stock_option():
    args = gpt(pipeline_model_parallel_size=2, tensor_model_parallel_size=2, world_size=4, num_experts=2)
    assert features.conflicts(args, [FAST], table=TABLE) == [
        "Fast is on together with pipeline parallelism: no stages. Set --pipeline-model-parallel-size 1."
    ]
    assert features.conflicts(args, [DENSE], table=TABLE) == []
    assert features.conflicts(args, [], table=TABLE) == []


@pytest.mark.parametrize("table", [(FAST, DENSE), (DENSE, FAST)], ids=["says it", "is told"])
def test_conflict_between_features_needs_to_be_said_once(table):
    (text,) = features.conflicts(gpt(), list(table), table=table)
    assert text == f"{table[0].title} is on together with {table[1].title}: Keep one."


def test_conflict_with_cpu():
    assert features.conflicts(gpt(), [FAST, LATER][:1], cpu=True, table=TABLE) == [
        "Fast is on together with --cpu: it needs a GPU kernel. Run without --cpu."
    ]
    assert features.conflicts(gpt(), [DENSE], cpu=True, table=TABLE) == []


def test_composition_that_nobody_states_is_an_error():
    silent = dataclasses.replace(FAST, conflicts={})
    with pytest.raises(KeyError):
        features.composition(silent, "dense", (silent, DENSE))


@pytest.mark.parametrize(
    ("names", "on", "text"),
    [
        (["replicas"], [], None),
        (["bytes", "replicas"], [FAST], None),
        (
            ["bytes", "layouts"],
            [],
            "--ext-check bytes,layouts is not offered by any feature that is on (none). "
            "This job can check: replicas.",
        ),
        (
            ["layouts", "bytes"],
            [FAST],
            "--ext-check layouts is not offered by any feature that is on (Fast). "
            "This job can check: bytes,replicas.",
        ),
    ],
)
def test_checks_that_no_feature_offers(names, on, text):
    args = gpt(ext_check=names)
    assert features.conflicts(args, on, table=TABLE) == ([text] if text else [])


def test_patches_of_a_feature():
    assert [p.feature for f in (FAST, DENSE, LATER) for p in f.patches(None)] == ["fast", "dense"]
    assert FAST.groups(gpt()) == {"fast": [(0, 1)]}
    assert LATER.groups(gpt()) == {}


def test_composes_table():
    text = tables.composes_table(TABLE)
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("|")}
    assert rows[""] == "|  | stock with `--cpu` | Fast | Dense | Later |"
    assert rows["tensor parallelism"] == "| tensor parallelism | yes | yes | yes | planned |"
    assert rows["pipeline parallelism"] == "| pipeline parallelism | yes | no [1] | yes | planned |"
    assert rows["context parallelism"] == "| context parallelism | no [2] | yes | yes | planned |"
    assert rows["fp8 and fp4"] == "| fp8 and fp4 | no [2] | yes | yes | planned |"
    assert rows["mixture of experts"] == "| mixture of experts | untested | untested | yes | planned |"


def test_composes_table_numbers_its_notes():
    lines = tables.composes_table(TABLE).splitlines()
    notes = dict(line.strip()[1:].split("] ", 1) for line in lines if line.startswith("["))
    (pipeline,) = [line for line in lines if line.startswith("| pipeline parallelism |")]
    number = pipeline.split("no [")[1].split("]")[0]
    assert notes[number] == "no stages. Set --pipeline-model-parallel-size 1."
    (dense,) = [line for line in lines if line.startswith("| Dense |")]
    number = dense.split("no [")[1].split("]")[0]
    assert notes[number] == "Keep one."
    assert dense.endswith("| - | planned |")
    (fast,) = [line for line in lines if line.startswith("| Fast |")]
    assert fast.split(" | ")[1].startswith("no [")
    assert len(set(notes.values())) == len(notes)


def test_feature_table():
    assert tables.feature_table(TABLE).splitlines()[2:] == [
        "| [Fast](docs/fast.md) | goes faster | ready |",
        "| Dense | is dense | ready |",
        "| Later | comes later | planned |",
    ]


# The project's own table.


def test_names_are_unique():
    names = [f.name for f in FEATURES] + [o.name for o in STOCK_OPTIONS]
    assert len(names) == len(set(names))


def test_ready_features_say_what_they_compose_with():
    ready = [f for f in FEATURES if f.status == "ready"]
    for feature in ready:
        for other in (*STOCK_OPTIONS, *(f for f in ready if f is not feature)):
            assert features.composition(feature, other.name)


def test_every_feature_and_option_is_in_the_tables():
    text = tables.composes_table()
    assert all(f"\n| {o.title} |" in text for o in STOCK_OPTIONS)
    assert all(f"\n| {f.title} |" in text and f"| {f.what} |" in tables.feature_table() for f in FEATURES)
