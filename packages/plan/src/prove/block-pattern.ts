import { KvError } from "@kv/interface";
import {
  afterPadding,
  type BlockContents,
  type BytePlace,
  placeAt,
} from "./contents/block-contents.js";
import { type BlockPass, originOf, type PassGrid, zeroingAt } from "./pass-effect.js";
import { fail, type PlanFault } from "./proof-result.js";

/** One descriptor's bytes as they land in a block of the destination. */
export interface Write {
  readonly offset: number;
  readonly lengthBytes: number;
  readonly source: number;
  readonly remoteOffset: number;
  /**
   * First token of the remote block that is read, counted from the first token of the destination
   * block.
   */
  readonly remoteToken: number;
}

/**
 * All facts that decide whether a destination block ends up right. Blocks with equal patterns share
 * one proof.
 */
export interface BlockPattern {
  readonly lengthBytes: number;
  readonly writes: readonly Write[];
  readonly pass: BlockPass;
  readonly grid: PassGrid;
  /** Tokens of the block that the request needs, from the first to one past the last. */
  readonly neededFrom: number;
  readonly neededTo: number;
  /** Whether tokens before the needed ones, of a window, must have been cleared. */
  readonly clearsLead: boolean;
  /** Whether tokens after the needed ones must have been cleared. */
  readonly clearsTail: boolean;
  readonly contents: BlockContents;
  /** Of a block at each source, by its position in the plan. */
  readonly sourceContents: readonly (BlockContents | undefined)[];
}

export function patternKey(pattern: BlockPattern): string {
  const { pass } = pattern;
  let key = `${pattern.lengthBytes};${pattern.neededFrom};${pattern.neededTo};${pass.permuted};${pass.zeroUntilToken};${pass.zeroFromToken}`;
  for (const write of pattern.writes)
    key += `;${write.offset},${write.lengthBytes},${write.source},${write.remoteOffset},${write.remoteToken}`;
  return key;
}

/**
 * Follows every byte of the finished block back to its source, a run at a time. `where` completes
 * the fault.
 */
export function provePattern(pattern: BlockPattern, where: PlanFault["at"]): void {
  const { contents, pass, lengthBytes } = pattern;
  const writes = [...pattern.writes].sort((one, two) => one.offset - two.offset);
  requireOnce(writes, where);
  for (let offset = 0; offset < lengthBytes; ) {
    const want = placeAt(contents, offset);
    if (want === undefined) {
      offset = afterPadding(contents, offset, lengthBytes);
      continue;
    }
    const zeroing = zeroingAt(pattern.grid, offset, pass);
    const at = {
      ...where,
      offset,
      head: want.head,
      tokenInBlock: want.token,
      cellByte: want.cellByte,
    };
    const isTail = want.token + contents.tokensPerStep > pattern.neededTo;
    if (isTail && !zeroing.zeroed && pattern.clearsTail) {
      fail(
        "tail-not-cleared",
        "a token that the request does not have keeps the bytes of another",
        at,
      );
    }
    const isLead = want.token + contents.tokensPerStep <= pattern.neededFrom;
    if (isLead && !zeroing.zeroed && pattern.clearsLead)
      fail("lead-not-cleared", "a token before the remote's window keeps the bytes of another", at);
    const toEdge = bytesToEdge(pattern, want);
    if (want.token >= pattern.neededTo || isLead) {
      const runBytes = onward(zeroing.runBytes, toEdge);
      if (want.token < pattern.neededFrom) requireUntouched(pattern, writes, offset, runBytes, at);
      offset += runBytes;
      continue;
    }
    if (zeroing.zeroed)
      fail("needed-but-cleared", "the receive pass zeroes a token that the request needs", at);
    const moved = sourceRun(pattern, writes, want, offset, at);
    offset += onward(moved, toEdge, zeroing.runBytes);
  }
}

/** The length of the shortest run. A run without a byte would never end. */
function onward(...runs: number[]): number {
  const step = Math.min(...runs);
  if (step > 0) return step;
  throw new KvError("KV_INTERNAL", `a proof makes no progress: runs of ${runs.join(", ")} bytes`);
}

/** Checks where the byte comes from; returns the bytes from there on that come in the same way. */
function sourceRun(
  pattern: BlockPattern,
  writes: readonly Write[],
  want: BytePlace,
  offset: number,
  at: PlanFault["at"],
): number {
  const origin = pattern.pass.permuted
    ? originOf(pattern.grid, offset)
    : { offset, runBytes: pattern.lengthBytes - offset };
  const write = writeAt(writes, origin.offset);
  if (write === undefined) {
    fail("not-written", "nothing is written to a byte that the request needs", {
      ...at,
      landed: origin.offset,
    });
  }
  const into = origin.offset - write.offset;
  const source = pattern.sourceContents[write.source];
  const got = source === undefined ? undefined : placeAt(source, write.remoteOffset + into);
  const from = { ...at, source: write.source, remoteOffset: write.remoteOffset + into };
  if (got === undefined)
    fail("wrong-source", "a byte that the request needs comes from padding", from);
  const gotToken = got.token + write.remoteToken;
  const same = got.head === want.head && gotToken === want.token && got.cellByte === want.cellByte;
  if (!same || got.tile.name !== want.tile.name) {
    fail(
      "wrong-source",
      `head ${want.head}, token ${want.token} of the block, byte ${want.cellByte} of "${want.tile.name}" comes from head ${got.head}, ` +
        `token ${gotToken}, byte ${got.cellByte} of "${got.tile.name}"`,
      from,
    );
  }
  const together =
    want.runAxis === got.runAxis
      ? Math.min(want.runBytes, got.runBytes)
      : Math.min(want.cellRest, got.cellRest);
  return Math.min(together, origin.runBytes, write.lengthBytes - into);
}

/**
 * Refuses writes before the first token that the request takes: those tokens belong to a prefix hit
 * or to another request.
 */
function requireUntouched(
  { pass }: BlockPattern,
  writes: readonly Write[],
  offset: number,
  runBytes: number,
  at: PlanFault["at"],
): void {
  if (pass.permuted) return;
  const write = writes.find(
    (one) => one.offset < offset + runBytes && one.offset + one.lengthBytes > offset,
  );
  if (write === undefined) return;
  fail("foreign-write", "a token before the first that the request takes is overwritten", {
    ...at,
    written: write.offset,
  });
}

/** Bytes along the run of `here` until what the request needs begins or ends. */
function bytesToEdge({ contents, neededFrom, neededTo }: BlockPattern, here: BytePlace): number {
  if (here.runAxis === "cell") return here.cellRest;
  if (here.runAxis === "head") return here.runBytes;
  const edge =
    here.token < neededFrom
      ? neededFrom
      : here.token < neededTo
        ? neededTo
        : Number.POSITIVE_INFINITY;
  const steps = Math.ceil((edge - here.token) / contents.tokensPerStep);
  return Math.min(here.runBytes, here.cellRest + (steps - 1) * here.tile.cellBytes);
}

function requireOnce(writes: readonly Write[], where: PlanFault["at"]): void {
  for (const [index, write] of writes.entries()) {
    const before = writes[index - 1];
    if (before === undefined || before.offset + before.lengthBytes <= write.offset) continue;
    fail(
      "written-twice",
      `bytes from ${write.offset} of the block are written by two descriptors`,
      {
        ...where,
        offset: write.offset,
      },
    );
  }
}

function writeAt(writes: readonly Write[], offset: number): Write | undefined {
  let [low, high] = [0, writes.length - 1];
  while (low <= high) {
    const middle = (low + high) >> 1;
    const write = writes[middle] as Write;
    if (offset < write.offset) high = middle - 1;
    else if (offset >= write.offset + write.lengthBytes) low = middle + 1;
    else return write;
  }
  return undefined;
}
