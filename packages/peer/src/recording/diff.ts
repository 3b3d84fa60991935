import { cacheKind } from "@kv/plan";
import type { AgentMetadata } from "@kv/protocol";
import type { PrefilledPrompt } from "../headless/matching-decode.js";
import { type GivenGroups, groupKinds, groupsOfRegion } from "../protocol/cache-groups.js";
import { readRemotePrefill } from "../protocol/remote-engine.js";
import type { RecordedHandshake, Recording } from "./recording.js";

/** One difference between two recordings. */
export interface Difference {
  /** Such as "prefill rank 0: blockSize" or "prompt 1: rank 0, model.layers.0.self_attn.attn". */
  readonly where: string;
  readonly one: string;
  readonly other: string;
  /**
   * `pairing`: a peer of one server may refuse the other. `result`: KV or tokens differ. `fact`:
   * harmless by itself.
   */
  readonly kind: "pairing" | "result" | "fact";
}

/** Options of `diffRecordings`. */
export interface DiffOptions {
  /** The largest difference of KV values that counts as equal. @default 0 */
  readonly tolerance?: number | undefined;
  /** @default those of the recordings, or of the handshakes where these say them */
  readonly groups?: GivenGroups | undefined;
  /** @default bytes are compared */
  readonly valueType?: "float32" | "float16" | "bfloat16" | undefined;
}

const PER_START: readonly (keyof AgentMetadata)[] = [
  "engineId",
  "agentMetadata",
  "baseAddresses",
  "deviceId",
];
const SIZES: readonly (keyof AgentMetadata)[] = ["numBlocks", "regionNumBlocks"];
/** They change with every request or the prefix cache. */
const PER_REQUEST = [
  "remote_block_ids",
  "remote_engine_id",
  "remote_request_id",
  "remote_host",
  "remote_port",
  "remote_blocks_expiry_time",
  "remote_prefill_cached_tokens",
  "kv_peer",
];
const MAX_SHOWN_CHARACTERS = 120;

/**
 * Compares two versions, settings or runs.
 *
 * @throws those of `Recording.handshakes` and `Recording.kv`.
 */
export async function diffRecordings(
  one: Recording,
  other: Recording,
  options: DiffOptions = {},
): Promise<Difference[]> {
  const [a, b] = [one.manifest, other.manifest];
  const found: Difference[] = [];
  const compare = (where: string, left: unknown, right: unknown, kind: Difference["kind"]) => {
    const [x, y] = [asText(left), asText(right)];
    const shown = (text: string) => text.slice(0, MAX_SHOWN_CHARACTERS);
    if (x !== y) found.push({ where, one: shown(x), other: shown(y), kind });
  };
  compare("tp size", a.tpSize, b.tpSize, "pairing");
  for (const role of ["prefill", "decode"] as const) {
    const [left, right] = [a[role], b[role]];
    compare(`${role}: vLLM`, left?.vllmVersion, right?.vllmVersion, "pairing");
    compare(`${role}: model`, left?.model, right?.model, "pairing");
    if (left === undefined || right === undefined) continue;
    const [here, there] = [await one.handshakes(left), await other.handshakes(right)];
    compare(`${role}: ranks`, here.length, there.length, "pairing");
    for (const [rank, { payload, metadata }] of here.entries()) {
      const match = there[rank];
      if (match === undefined) continue;
      const where = `${role} rank ${rank}`;
      const hashes = [payload.compatibilityHash, match.payload.compatibilityHash];
      compare(`${where}: compatibility hash`, hashes[0], hashes[1], "pairing");
      for (const field of Object.keys(metadata) as (keyof AgentMetadata)[]) {
        if (PER_START.includes(field)) continue;
        const kind = SIZES.includes(field) ? "fact" : "pairing";
        compare(`${where}: ${field}`, metadata[field], match.metadata[field], kind);
      }
    }
  }
  compare("prompts", a.prompts.length, b.prompts.length, "fact");
  for (const [index, prompt] of a.prompts.entries()) {
    const match = b.prompts[index];
    if (match === undefined) continue;
    const where = `prompt ${index}`;
    compare(`${where}: tokens`, prompt.tokens, match.tokens, "fact");
    if (asText(prompt.tokens) !== asText(match.tokens)) continue;
    const keys = new Set([...Object.keys(prompt.params), ...Object.keys(match.params)]);
    for (const key of keys) {
      if (PER_REQUEST.includes(key))
        compare(`${where}: has ${key}`, key in prompt.params, key in match.params, "fact");
      else compare(`${where}: ${key}`, prompt.params[key], match.params[key], "pairing");
    }
    if (prompt.made !== undefined && match.made !== undefined)
      compare(`${where}: made`, prompt.made, match.made, "result");
    if (prompt.kv.sha256 === match.kv.sha256) continue;
    const groups = options.groups ?? a.groups ?? b.groups;
    const parts = filledParts(await one.handshakes(a.prefill), prompt, groups);
    for (const each of compareKv(await one.kv(prompt), await other.kv(match), parts, options))
      found.push({ ...each, where: `${where}: ${each.where}` });
  }
  return found;
}

export function compareKv(
  x: Uint8Array,
  y: Uint8Array,
  parts: readonly FilledPart[],
  options: DiffOptions,
): Difference[] {
  const kind = "result";
  if (x.byteLength !== y.byteLength) {
    const [one, other] = [`${x.byteLength} bytes`, `${y.byteLength} bytes`];
    return [{ where: "KV", one, other, kind }];
  }
  return parts.flatMap(({ name, offsetBytes, lengthBytes }) => {
    const part = (bytes: Uint8Array) => bytes.subarray(offsetBytes, offsetBytes + lengthBytes);
    const values = compareBytes(part(x), part(y), options);
    return values === undefined ? [] : [{ where: name, ...values, kind }];
  });
}

interface FilledPart {
  readonly name: string;
  readonly offsetBytes: number;
  readonly lengthBytes: number;
}

/**
 * For attention the blocks that the prompt fills; for states the last block's state. The rest holds
 * leftovers.
 *
 * @throws `KV_CONFIG_INVALID` where the kinds of the groups must be given.
 */
export function filledParts(
  handshakes: readonly Pick<RecordedHandshake, "tpRank" | "metadata">[],
  { params, tokens }: Pick<PrefilledPrompt, "params" | "tokens">,
  given?: GivenGroups | undefined,
): FilledPart[] {
  const parts: FilledPart[] = [];
  const blockIds = readRemotePrefill(params).remoteBlockIds;
  let offsetBytes = 0;
  for (const { tpRank, metadata } of handshakes) {
    const kinds = groupKinds(metadata, blockIds.length, given);
    const kernels = metadata.physicalBlocksPerLogical;
    const blockTokens = metadata.blockSize * kernels;
    const stateBytes = metadata.ssmSizes.reduce((sum, bytes) => sum + bytes, 0);
    for (const [region, blockLengthBytes] of metadata.blockLengthsBytes.entries()) {
      const pageBytes = blockLengthBytes * kernels;
      const regionName = `rank ${tpRank}, ${metadata.regionNames?.[region] ?? `region ${region}`}`;
      const groups = groupsOfRegion(metadata, region, blockIds.length);
      for (const group of groups) {
        const pages = blockIds[group]?.length ?? 0;
        const { extent } = cacheKind(kinds[group] ?? "full");
        const name = groups.length > 1 ? `${regionName}, group ${group}` : regionName;
        if (extent === "state" && pages > 0) {
          const lengthBytes = Math.min(pageBytes, stateBytes);
          parts.push({ name, offsetBytes: offsetBytes + (pages - 1) * pageBytes, lengthBytes });
        }
        if (extent !== "state" && extent !== "whole") {
          const isFull = tokens.length % blockTokens === 0 && pages * blockTokens <= tokens.length;
          const filled = Math.max(0, isFull ? pages : pages - 1);
          parts.push({ name, offsetBytes, lengthBytes: filled * pageBytes });
        }
        offsetBytes += pages * pageBytes;
      }
    }
  }
  return parts;
}

function compareBytes(
  x: Uint8Array,
  y: Uint8Array,
  { tolerance = 0, valueType }: DiffOptions,
): Pick<Difference, "one" | "other"> | undefined {
  if (Buffer.compare(x, y) === 0) return undefined;
  if (valueType === undefined) {
    let count = 0;
    for (const [at, byte] of x.entries()) if (byte !== y[at]) count += 1;
    return { one: `${count} of ${x.byteLength} bytes differ`, other: "(--type compares values)" };
  }
  const [left, right] = [valuesOf(x, valueType), valuesOf(y, valueType)];
  let count = 0;
  let most = 0;
  for (const [at, value] of left.entries()) {
    const apart = Math.abs(value - (right[at] ?? 0));
    if (apart <= tolerance || (Number.isNaN(value) && Number.isNaN(right[at]))) continue;
    count += 1;
    // NaN counts as the largest difference.
    if (!(apart <= most)) most = apart;
  }
  if (count === 0) return undefined;
  return {
    one: `${count} of ${left.length} values differ by more than ${tolerance}`,
    other: `the largest difference is ${most}`,
  };
}

function valuesOf(bytes: Uint8Array, type: NonNullable<DiffOptions["valueType"]>): Float32Array {
  if (type === "float32") return new Float32Array(bytes.slice().buffer, 0, bytes.byteLength >> 2);
  const words = new Uint16Array(bytes.slice().buffer, 0, bytes.byteLength >> 1);
  if (type === "float16") return Float32Array.from(words, fromFloat16);
  const wide = new Uint32Array(words.length);
  for (const [index, word] of words.entries()) wide[index] = word << 16;
  return new Float32Array(wide.buffer);
}

function fromFloat16(word: number): number {
  const sign = word & 0x8000 ? -1 : 1;
  const exponent = (word >> 10) & 0x1f;
  const fraction = word & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction === 0 ? sign * Number.POSITIVE_INFINITY : Number.NaN;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

function asText(value: unknown): string {
  return (
    JSON.stringify(value, (_, item: unknown) =>
      item instanceof Uint8Array ? Buffer.from(item).toString("hex") : item,
    ) ?? "absent"
  );
}
