import { readFileSync } from "node:fs";
import type { CheckedPair, CheckedSide } from "@kv/plan/vllm";

export const REFUSALS_FILE = new URL("fixtures/refusals.jsonl", import.meta.url);
const HEADS = 8;
/** Of one head in a block of 16 tokens. */
const HEAD_BYTES = 512;

/** `regionNames` null: the handshake names no regions. */
type ChangedSide = Partial<Omit<CheckedSide, "regionNames">> & {
  readonly regionNames?: readonly string[] | null;
};

type Change = Partial<Omit<CheckedPair, "local" | "remote">> & {
  readonly local?: ChangedSide;
  readonly remote?: ChangedSide;
};

/** A pair that breaks a rule or just keeps it. */
export interface RefusalCase {
  /** What differs from a pair that every version takes. */
  readonly changed: Change;
  /** By version: null, or the message with which vLLM refuses. */
  readonly says: Readonly<Record<string, string | null>>;
}

export const refusalCases = (): readonly RefusalCase[] =>
  readFileSync(REFUSALS_FILE, "utf8")
    .trimEnd()
    .split("\n")
    .map((line) => JSON.parse(line) as RefusalCase);

export function pairOf({ local = {}, remote = {}, ...change }: Change): CheckedPair {
  const facts = {
    numKvHeads: HEADS,
    isMla: false,
    hasStates: false,
    cacheDtype: "auto",
    isPush: false,
    prefixCaching: true,
    usesHostBuffer: false,
    permutes: false,
    needsHma: false,
    draftKvHeads: null,
    ...change,
  };
  const headsOf = (all: number, tpSize: number) => Math.max(1, Math.floor(all / tpSize));
  const side = ({ regionNames = ["layers.0", "layers.1"], ...given }: ChangedSide): CheckedSide => {
    const { tpSize = 1, blockSize = 16 } = given;
    const heads = facts.isMla ? 1 : headsOf(facts.numKvHeads, tpSize);
    const last = facts.draftKvHeads === null ? heads : headsOf(facts.draftKvHeads, tpSize);
    const usual = [heads, last].map((count) => (HEAD_BYTES * count * blockSize) / 16);
    const blockLengthsBytes = given.blockLengthsBytes ?? usual;
    return {
      tpSize,
      blockSize,
      dcpSize: 1,
      kernelsPerLogical: 1,
      layout: "LBHNC",
      attentionBackend: "FLASH_ATTN",
      regionNames: regionNames ?? undefined,
      regionGroupIds: [0, 0],
      blockLengthsBytes,
      blockStridesBytes: blockLengthsBytes,
      memoryTypes: blockLengthsBytes.map(() => "DRAM"),
      ...given,
    };
  };
  return { local: side(local), remote: side(remote), ...facts };
}
