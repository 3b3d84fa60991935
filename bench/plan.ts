import { performance } from "node:perf_hooks";
import { fileURLToPath } from "node:url";
import { buildEngineTransferPlan, type EngineTransferPlan, planRequest } from "@kv/plan";
import { proveEnginePlans } from "@kv/plan/prove";
import { type LinePeer, linePeer } from "../tools/clients/python.js";
import { mapping } from "./mapping.js";
import { vllmPython } from "./python-peer.js";
import { BLOCK_SIZE, ranksOf } from "./ranks.js";
import { alone, compare, pairRatio, type Row, spread } from "./report.js";

const REGIONS = 64;
const KV_HEADS = 8;
const TOKENS = [2048, 8192, 32_768, 131_072];
const ROUNDS = 31;
/** Time of calls before the measurement, so that V8 has compiled the code. */
const WARM_MS = 1_000;
const ORDERS = ["one run", "scattered"] as const;

function plansOf(
  prefillTp: number,
  decodeTp: number,
  regions: number,
  numBlocks: number,
): EngineTransferPlan[] {
  const ranks = (tpSize: number) => ranksOf({ numKvHeads: KV_HEADS, tpSize, regions, numBlocks });
  const [prefill, decode] = [ranks(prefillTp), ranks(decodeTp)];
  const each = prefillTp / decodeTp;
  return decode.map((local) => {
    const remotes = prefill.slice(local.tpRank * each, (local.tpRank + 1) * each);
    const plan = buildEngineTransferPlan({ local, remotes, numKvHeads: KV_HEADS, groups: ["full"] });
    // Tables are built at first use, which is in the handshake.
    for (const source of plan.sources) void (source.localTable.rows.length + source.remoteTable.rows.length);
    return plan;
  });
}

/** Block ids in one run, or every second id alternately from both ends, so that no descriptors can be merged. */
function idsOf(count: number, order: (typeof ORDERS)[number], from: number): number[] {
  if (order === "one run") return Array.from({ length: count }, (_, i) => from + i);
  return Array.from({ length: count }, (_, i) => from + 2 * (i % 2 === 0 ? i : count - i));
}

function timed(work: () => unknown): number {
  const begun = performance.now();
  work();
  return performance.now() - begun;
}

/** Measures `ours` and vLLM's work for `command` in turn. */
async function against(
  peer: LinePeer | undefined,
  what: string,
  ours: () => unknown,
  command: object,
  wanted: number,
): Promise<Row> {
  for (const until = performance.now() + WARM_MS; performance.now() < until; ) ours();
  const [mine, theirs]: [number[], number[]] = [[], []];
  for (let round = 0; round < ROUNDS; round++) {
    mine.push(Math.min(timed(ours), timed(ours), timed(ours)));
    const answer = await peer?.ask<{ ms: number[] }>({ ...command, times: 3 });
    if (answer !== undefined) theirs.push(Math.min(...answer.ms));
  }
  const ratio = peer === undefined ? undefined : pairRatio(theirs, mine);
  return {
    what: `${what}: vLLM's time / ours`,
    ours: spread(mine, "ms"),
    theirs: peer === undefined ? "not set up: npm run test:vllm" : spread(theirs, "ms"),
    ratio,
    wanted: `>= ${wanted}`,
    met: ratio === undefined ? undefined : ratio >= wanted,
    rounds: ROUNDS,
  };
}

/** The time from a request to the descriptors for the transport, against vLLM. */
async function requests(peer: LinePeer | undefined): Promise<Row[]> {
  const rows: Row[] = [];
  for (const tokens of TOKENS) {
    const count = tokens / BLOCK_SIZE;
    const numBlocks = 2 * count + 16;
    const [plan] = plansOf(1, 1, REGIONS, numBlocks);
    if (plan === undefined) throw new Error("no plan");
    const where = `${tokens} tokens x ${REGIONS} regions`;
    for (const order of ORDERS) {
      const [localIds, remoteIds] = [idsOf(count, order, 1), idsOf(count, order, 3)];
      rows.push(
        await against(
          peer,
          `request to what NIXL is asked for, both sides, ${where}, ${order}`,
          () =>
            planRequest(plan, {
              localBlockIds: [localIds],
              remoteBlockIds: [remoteIds],
              numTokens: tokens,
            }).reads.map(({ descriptors }) => descriptors),
          { do: "prepare", regions: REGIONS, blocks: numBlocks, localIds, remoteIds },
          order === "one run" ? 5 : 1,
        ),
      );
    }
  }
  return rows;
}

/** The bytes of heap and array buffers that the result of `work` holds. */
function heldBytes(work: () => unknown): number {
  const collect = (globalThis as { gc?: () => void }).gc;
  collect?.();
  const before = process.memoryUsage();
  const held = work();
  collect?.();
  const after = process.memoryUsage();
  if (held === undefined) throw new Error("nothing is held");
  return after.heapUsed + after.arrayBuffers - before.heapUsed - before.arrayBuffers;
}

/** Builds and proves the plans of all ranks for TP 8 to 4 with 80 layers, with 1,000 and with 100,000 blocks. */
function large(): Row[] {
  const build = (numBlocks: number) => plansOf(8, 4, 80, numBlocks);
  const prove = (plans: readonly EngineTransferPlan[], numBlocks: number) => {
    const verdict = proveEnginePlans(plans, {
      remotes: ranksOf({ numKvHeads: KV_HEADS, tpSize: 8, regions: 80, numBlocks }),
      numKvHeads: KV_HEADS,
    });
    if (!verdict.proven) throw new Error(verdict.fault.message);
  };
  build(1000);
  const times = (work: () => void) => Array.from({ length: 9 }, () => timed(work));
  const [many, few] = [times(() => build(100_000)), times(() => build(1000))];
  const [plans, small] = [build(100_000), build(1000)];
  const proofs = times(() => prove(plans, 100_000));
  const smallProofs = times(() => prove(small, 1000));
  const [manyBytes, fewBytes] = [heldBytes(() => build(100_000)), heldBytes(() => build(1000))];
  const slowest = Math.max(...many);
  const grown = manyBytes / fewBytes;
  const kib = (bytes: number) => `${(bytes / 1024).toFixed(0)} KiB`;
  const [what, beside] = ["plans of 4 ranks, TP 8 to 4, 80 layers, 100000 blocks", spread(few, "ms")];
  return [
    alone(what, spread(many, "ms"), "<= 1000 ms", slowest <= 1000, `1000 blocks ${beside}`),
    {
      ...{ what: "memory that they hold: 100000 blocks / 1000 blocks", wanted: "<= 1.2", ratio: grown },
      ...{ ours: kib(manyBytes), theirs: kib(fewBytes), met: "gc" in globalThis ? grown <= 1.2 : undefined },
    },
    compare("their proof: 100000 blocks / 1000 blocks", [proofs, smallProofs], "ms", "<=", 1.5),
  ];
}

export async function plan(): Promise<readonly Row[]> {
  const vllm = vllmPython();
  const script = fileURLToPath(new URL("./python/plan.py", import.meta.url));
  const peer = vllm === undefined ? undefined : linePeer(vllm.python, [script], vllm.env);
  try {
    return [...(await requests(peer)), ...(await mapping()), ...large()];
  } finally {
    await peer?.close();
  }
}
