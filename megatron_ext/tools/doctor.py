"""`megatron-ext doctor`: is this machine fit to train? Exit code 0 says yes, 1 says no."""

import argparse

from megatron_ext.tools import doctor_gpu, doctor_machine, doctor_software
from megatron_ext.tools.doctor_report import Finding, as_json, text, verdict


def main(argv: list[str]) -> int:
    """Run every check, print what it finds as it goes; 0 if nothing failed (warnings allowed), else 1."""
    options = _parser().parse_args(argv)
    asked = "CPU runs" if options.cpu else "GPU runs" if options.require_gpu else "what this machine has"
    findings: list[Finding] = []
    for source in (
        doctor_software.check(options.cpu),
        doctor_gpu.check(options.cpu, options.require_gpu),
        doctor_machine.check(options.cpu),
    ):
        for finding in source:
            findings.append(finding)
            if not options.json:
                print(text(finding), flush=True)
    print(as_json(findings, asked) if options.json else verdict(findings, asked))
    return int(any(finding.level == "FAIL" for finding in findings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ext doctor",
        description="Check versions, import paths (a wheel and a checkout can mix), what changed upstream, "
        "packages, environment variables, GPUs, network, shared memory. Exit code 0: healthy, 1: not.",
    )
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--cpu", action="store_true", help="check for runs with --cpu: GPUs do not matter")
    device.add_argument(
        "--require-gpu", action="store_true", help="fail when no GPU can be used (cluster jobs)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    return parser
