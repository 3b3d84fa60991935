import { performance } from "node:perf_hooks";
import { computeTpMapping } from "@kv/topology";
import { pythonOnce, vllmPython } from "./python-peer.js";
import { alone, pairRatio, type Row, spread } from "./report.js";

const SIZES = [1, 2, 4, 8];
const ROUNDS = 200;

/**
 * computeTpMapping against vLLM's compute_tp_mapping over the grid of
 * tools/bench/python/mapping.py.
 */
export async function mapping(): Promise<readonly Row[]> {
  const what = "TP mapping, a grid of 240 calls: vLLM's time / ours";
  const vllm = vllmPython();
  if (vllm === undefined)
    return [alone(what, "-", ">= 10", undefined, "not set up: npm run test:vllm")];
  const inputs = SIZES.flatMap((tpSize) =>
    SIZES.flatMap((remoteTpSize) =>
      SIZES.flatMap((numKvHeads) =>
        Array.from({ length: tpSize }, (_, tpRank) => ({
          tpRank,
          tpSize,
          remoteTpSize,
          numKvHeads,
          isMla: false,
          groups: ["full" as const],
        })),
      ),
    ),
  );
  const round = () => {
    const begun = performance.now();
    for (const input of inputs) computeTpMapping(input);
    return performance.now() - begun;
  };
  const theirs = (await pythonOnce(vllm.python, "mapping.py", [String(ROUNDS)], vllm.env)) as {
    calls: number;
    ms: number[];
  };
  for (let i = 0; i < ROUNDS; i += 1) round();
  const ours = Array.from({ length: ROUNDS }, round);
  const [own, other] = [ours, theirs.ms].map((values) => spread(values, "ms")) as [string, string];
  const ratio = pairRatio(theirs.ms, ours) * (inputs.length / theirs.calls);
  return [
    { what, ours: own, theirs: other, ratio, wanted: ">= 10", met: ratio >= 10, rounds: ROUNDS },
  ];
}
