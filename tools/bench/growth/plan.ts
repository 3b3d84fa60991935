import { join } from "node:path";
import { planRequest } from "@kv/plan";
import { proveEnginePlans } from "@kv/plan/prove";
import { runKvPlan } from "../../../packages/kv-plan/src/run.js";
import { BLOCK_SIZE, idsOf, ORDERS, planOf, type RanksOptions, ranksOf } from "../ranks.js";
import { type Group, processorTime, type Quantity } from "./measure.js";

const KV_HEADS = 64;
const MODEL = join(import.meta.dirname, "../../../packages/kv-plan/models/llama-3.1-70b.json");
/** A proof is part of a deployment's check, not of a request. */
const PROOF_SECONDS = 5;

type Shape = Omit<RanksOptions, "numKvHeads">;
const ranks = (shape: Shape) => ranksOf({ numKvHeads: KV_HEADS, ...shape });

const TP = [1, 4, 16, 64] as const;
const LAYERS = [4, 16, 64, 256] as const;
const GROUPS = [1, 4, 16, 64] as const;
const BLOCKS = [1000, 10_000, 100_000, 1_000_000, 10_000_000] as const;
const both = (shape: Shape) => ({ local: shape, remote: shape });

/** Of a plan: what its sizes count, its cost per item, and its ranks. */
interface Planned {
  readonly sizeOf: string;
  readonly sizes: readonly number[];
  readonly per?: string;
  items?(size: number): number;
  shapes(size: number): { readonly local: Shape; readonly remote: Shape };
  readonly isAlone?: boolean;
}

const PLANS: Readonly<Record<string, Planned>> = {
  "plan of a rank that reads from all ranks of P": {
    sizeOf: "ranks of P, 32 layers",
    sizes: TP,
    per: "source and region",
    items: (size) => 32 * size,
    shapes: (tpSize) => ({ local: {}, remote: { tpSize } }),
  },
  "plan of a rank with one source, equal sizes": {
    sizeOf: "ranks on both sides, 32 layers",
    sizes: TP,
    shapes: (tpSize) => both({ tpSize }),
    isAlone: true,
  },
  "plan of a rank that reads a part of P's one rank": {
    sizeOf: "ranks of D, 32 layers",
    sizes: TP,
    shapes: (tpSize) => ({ local: { tpSize }, remote: {} }),
  },
  "plan of a rank, by layers": {
    sizeOf: "layers",
    sizes: LAYERS,
    per: "region",
    items: (size) => size,
    shapes: (regions) => both({ regions }),
  },
  "plan of a rank, by groups": {
    sizeOf: "KV cache groups, 64 layers",
    sizes: GROUPS,
    shapes: (groups) => both({ regions: 64, groups }),
  },
  "plan of a rank, by blocks": {
    sizeOf: "blocks, 32 layers",
    sizes: BLOCKS,
    shapes: (numBlocks) => both({ numBlocks }),
  },
};

const plans = Object.entries(PLANS).map(([name, planned]): Quantity => {
  const { sizeOf, sizes, per = "plan", items = () => 1, shapes, isAlone } = planned;
  return {
    name,
    unit: `us per ${per}`,
    sizeOf,
    sizes,
    measure(size) {
      const { local, remote } = shapes(size);
      const [first] = ranks(local);
      const remotes = isAlone ? ranks(remote).slice(0, 1) : ranks(remote);
      const build = () => planOf(first, remotes, KV_HEADS, local.groups);
      return processorTime("us", items(size), build);
    },
  };
});

const requests = ORDERS.map(
  (order): Quantity => ({
    name: `request, blocks in ${order === "one run" ? order : "no runs"}, 8 regions`,
    unit: "ns per block",
    sizeOf: "blocks",
    sizes: [100, 1000, 10_000, 100_000],
    measure(size) {
      const [rank] = ranks({ regions: 8, numBlocks: 2 * size + 16 });
      const plan = planOf(rank, [rank], KV_HEADS);
      const blocks = {
        localBlockIds: [idsOf(size, order, 1)],
        remoteBlockIds: [idsOf(size, order, 3)],
        numTokens: size * BLOCK_SIZE,
      };
      return processorTime("ns", size, () =>
        planRequest(plan, blocks).reads.map(({ descriptors }) => descriptors),
      );
    },
  }),
);

/** With equal sizes, each rank has one source. */
const proof = (
  name: string,
  sizeOf: string,
  sizes: readonly number[],
  exponent: number,
  shapeOf: (size: number) => Shape,
): Quantity => ({
  name,
  unit: "s",
  sizeOf,
  sizes,
  exponent,
  most: PROOF_SECONDS,
  measure(size) {
    const remotes = ranks(shapeOf(size));
    const made = remotes.map((rank) => planOf(rank, [rank], KV_HEADS));
    return processorTime("s", 1, () => {
      const verdict = proveEnginePlans(made, { remotes, numKvHeads: KV_HEADS });
      if (!verdict.proven) throw new Error(verdict.fault.message);
    });
  },
});

async function planModel(tp: string) {
  let errors = "";
  const output = {
    stdout() {},
    stderr(text: string) {
      errors += text;
    },
  };
  const args = ["--config", MODEL, "--tp", tp, "--tp", tp, "--json"];
  if ((await runKvPlan(args, output)) !== 0) throw new Error(errors);
}

export const group: Group = {
  title: "Plans and proofs",
  quantities: [
    ...plans,
    ...requests,
    proof("proof of all ranks", "ranks on both sides, 32 layers", TP, 1, (tpSize) => ({ tpSize })),
    proof("proof of one rank, by layers", "layers", LAYERS, 1, (regions) => ({ regions })),
    proof("proof of one rank, by blocks", "blocks, 32 layers", BLOCKS, 0, (numBlocks) => ({
      numBlocks,
    })),
    {
      name: "kv-plan: Llama 3.1 70B, plan, proof and report",
      unit: "s",
      sizeOf: "ranks on both sides",
      sizes: TP,
      exponent: 1,
      most: PROOF_SECONDS,
      measure: (size) => processorTime("s", 1, () => planModel(`${size}`)),
    },
  ],
};
