import { VLLM_REFUSALS } from "@kv/plan/vllm";
import { expect, test } from "vitest";
import { checkDigest } from "../../packages/peer/src/wire/compare-wire.js";
import CHECKS from "../../packages/peer/src/wire/vllm-checks.json" with { type: "json" };
import { connectorChecks } from "./connector-checks.js";

// Each check of vLLM's NIXL connector is a row of the table of refusals, or is none for one of
// these reasons.

const NO_REFUSAL: Readonly<Record<string, string>> = {
  settings: "one engine's own settings, whoever its peer is: it does not start",
  "own-state": "what this vLLM has set itself before: no peer changes it",
  malformed:
    "metadata that contradict themselves, or another engine than the one that was asked for",
  hash: "the compatibility hash, or what differs only where it does: @kv/protocol compares its factors",
  "after-a-row": "what a row of the table refuses before vLLM comes here",
  elsewhere: "other code in these files: statistics, outputs of workers, sockets",
};
const releases: Readonly<Record<string, string>> = CHECKS;
const lines = connectorChecks();
const linesOf = (id: string) => lines.filter(({ is }) => is.includes(id));

test.each(Object.keys(releases))(
  "field.md P2: the list has the checks of vLLM %s that kv-peer wire knows, and no other",
  (release) => {
    const digests = lines.flatMap((line) =>
      line.releases.includes(release) ? [checkDigest(line.check)] : [],
    );
    expect([...new Set(digests)].sort()).toEqual(releases[release]?.split(" "));
  },
);

test("field.md P2: each check is a row of the table, or names why it refuses no pair", () => {
  const known = new Set([...VLLM_REFUSALS.map(({ id }) => id), ...Object.keys(NO_REFUSAL)]);
  expect(lines.filter(({ is }) => is.length === 0 || !is.every((id) => known.has(id)))).toEqual([]);
});

test.each(VLLM_REFUSALS)(
  "field.md P2: row $id is a check of the function, message and releases that it names",
  ({ id, where, says, since = "0.31.0" }) => {
    const own = linesOf(id);
    const name = where.split(/[ .]/).at(-1);
    for (const { check } of own) {
      expect(check).toContain(`.${name}: `);
      if (check.includes(": raise ")) expect(check).toContain(says);
    }
    const from = Object.keys(releases).filter((release) => release >= since);
    expect(own.flatMap((line) => line.releases)).toEqual(expect.arrayContaining(from));
  },
);
