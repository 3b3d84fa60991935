import { fileURLToPath } from "node:url";
import {
  buildEngineTransferPlan,
  type EngineTransferPlan,
  planRequest,
  type RankGeometry,
} from "@kv/plan";
import { proveEnginePlans } from "@kv/plan/prove";
import { runKvPlan } from "../../../../packages/kv-plan/src/run.js";
import { BLOCK_SIZE, idsOf, type ORDERS, type RanksOptions, ranksOf } from "../../ranks.js";
import { processorTime } from "../costs.js";
import type { Group, Quantity } from "../quantity.js";

const KV_HEADS = 64;
const MODEL = fileURLToPath(
  new URL("../../../../packages/kv-plan/models/llama-3.1-70b.json", import.meta.url),
);
/** A proof is part of a deployment's check, not of a request. */
const PROOF_SECONDS = 5;

type Shape = Omit<RanksOptions, "numKvHeads">;
const ranks = (shape: Shape) => ranksOf({ numKvHeads: KV_HEADS, ...shape });

/**
 * The plan of one local rank that exchanges with all of the remotes. Tables are built at first use,
 * which is in the handshake.
 */
function build(
  local: RankGeometry | undefined,
  remotes: readonly RankGeometry[],
  groups = 1,
): EngineTransferPlan {
  if (local === undefined) throw new Error("no local rank");
  const kinds = Array.from({ length: groups }, () => "full" as const);
  const plan = buildEngineTransferPlan({ local, remotes, numKvHeads: KV_HEADS, groups: kinds });
  for (const source of plan.sources)
    void (source.localTable.rows.length + source.remoteTable.rows.length);
  return plan;
}

/** The plans of all ranks of D. With equal sizes, each rank has one source. */
function plansOfAllRanks(shape: Shape): EngineTransferPlan[] {
  const remotes = ranks(shape);
  return ranks(shape).map((local) => build(local, remotes.slice(local.tpRank, local.tpRank + 1)));
}

function planTime(
  name: string,
  given: {
    sizeOf: string;
    sizes: readonly number[];
    perItem: string;
    items?: (size: number) => number;
  },
  shapesOf: (size: number) => { local: Shape; remote: Shape; sources?: number },
): Quantity {
  const { sizeOf, sizes, perItem, items = () => 1 } = given;
  return {
    name,
    unit: `us per ${perItem}`,
    sizeOf,
    sizes,
    exponent: 0,
    measure(size) {
      const { local, remote, sources } = shapesOf(size);
      const [locals, remotes] = [ranks(local), ranks(remote).slice(0, sources)];
      return processorTime("us", items(size), () => build(locals[0], remotes, local.groups));
    },
  };
}

/** A request with its blocks in this order. */
function requestTime(order: (typeof ORDERS)[number]): Quantity {
  return {
    name: `request, blocks in ${order === "one run" ? order : "no runs"}, 8 regions`,
    unit: "ns per block",
    sizeOf: "blocks",
    sizes: [100, 1000, 10_000, 100_000],
    exponent: 0,
    measure(size) {
      const shape = { regions: 8, numBlocks: 2 * size + 16 };
      const plan = build(ranks(shape)[0], ranks(shape));
      const ids = (from: number) => [idsOf(size, order, from)];
      const blocks = {
        localBlockIds: ids(1),
        remoteBlockIds: ids(3),
        numTokens: size * BLOCK_SIZE,
      };
      return processorTime("ns", size, () =>
        planRequest(plan, blocks).reads.map(({ descriptors }) => descriptors),
      );
    },
  };
}

function proofTime(
  name: string,
  given: { sizeOf: string; sizes: readonly number[]; exponent: number },
  shapeOf: (size: number) => Shape,
): Quantity {
  return {
    name,
    unit: "s",
    ...given,
    most: PROOF_SECONDS,
    measure(size) {
      const shape = shapeOf(size);
      const plans = plansOfAllRanks(shape);
      const remotes = ranks(shape);
      return processorTime("s", 1, () => {
        const verdict = proveEnginePlans(plans, { remotes, numKvHeads: KV_HEADS });
        if (!verdict.proven) throw new Error(verdict.fault.message);
      });
    },
  };
}

const TP = [1, 4, 16, 64] as const;
const LAYERS = [4, 16, 64, 256] as const;
const BLOCKS = [1000, 10_000, 100_000, 1_000_000, 10_000_000] as const;

export const plan: Group = {
  name: "plan",
  title: "Plans and proofs",
  quantities: [
    planTime(
      "plan of a rank that reads from all ranks of P",
      {
        sizeOf: "ranks of P, 32 layers",
        sizes: TP,
        perItem: "source and region",
        items: (size) => 32 * size,
      },
      (size) => ({ local: {}, remote: { tpSize: size } }),
    ),
    planTime(
      "plan of a rank with one source, equal sizes",
      { sizeOf: "ranks on both sides, 32 layers", sizes: TP, perItem: "plan" },
      (size) => ({ local: { tpSize: size }, remote: { tpSize: size }, sources: 1 }),
    ),
    planTime(
      "plan of a rank that reads a part of P's one rank",
      { sizeOf: "ranks of D, 32 layers", sizes: TP, perItem: "plan" },
      (size) => ({ local: { tpSize: size }, remote: {} }),
    ),
    planTime(
      "plan of a rank, by layers",
      { sizeOf: "layers", sizes: LAYERS, perItem: "region", items: (size) => size },
      (size) => ({ local: { regions: size }, remote: { regions: size } }),
    ),
    planTime(
      "plan of a rank, by groups",
      { sizeOf: "KV cache groups, 64 layers", sizes: [1, 4, 16, 64], perItem: "plan" },
      (size) => ({ local: { regions: 64, groups: size }, remote: { regions: 64, groups: size } }),
    ),
    planTime(
      "plan of a rank, by blocks",
      { sizeOf: "blocks, 32 layers", sizes: BLOCKS, perItem: "plan" },
      (size) => ({ local: { numBlocks: size }, remote: { numBlocks: size } }),
    ),
    requestTime("one run"),
    requestTime("scattered"),
    proofTime(
      "proof of all ranks",
      { sizeOf: "ranks on both sides, 32 layers", sizes: TP, exponent: 1 },
      (size) => ({ tpSize: size }),
    ),
    proofTime(
      "proof of one rank, by layers",
      { sizeOf: "layers", sizes: LAYERS, exponent: 1 },
      (size) => ({
        regions: size,
      }),
    ),
    proofTime(
      "proof of one rank, by blocks",
      { sizeOf: "blocks, 32 layers", sizes: BLOCKS, exponent: 0 },
      (size) => ({ numBlocks: size }),
    ),
    {
      name: "kv-plan: Llama 3.1 70B, plan, proof and report",
      unit: "s",
      sizeOf: "ranks on both sides",
      sizes: TP,
      exponent: 1,
      most: PROOF_SECONDS,
      measure: (size) =>
        processorTime("s", 1, async () => {
          let errors = "";
          const output = {
            stdout() {},
            stderr(text: string) {
              errors += text;
            },
          };
          const args = ["--config", MODEL, "--tp", `${size}`, "--tp", `${size}`, "--json"];
          if ((await runKvPlan(args, output)) !== 0) throw new Error(errors);
        }),
    },
  ],
};
