import { createHash } from "node:crypto";
import { KvError } from "@kv/interface";

/** Those of vLLM's `--prefix-caching-hash-algo` whose hashes are equal in every process. */
export type BlockHashAlgorithm = "sha256" | "sha256_cbor";

/**
 * What else decides a block's KV: `["lora", name, path]`, `["mm", identifier, offset]` or
 * `["cache_salt", salt]`.
 */
export type BlockHashKey = readonly (string | number)[];

/** vLLM's seed without `PYTHONHASHSEED`. */
export const DEFAULT_HASH_SEED = "vllm-none-hash";

/** Arrays are Python tuples, numbers integers. */
type Value = string | number | null | Uint8Array | readonly Value[];

/** Python would pickle longer blocks in several frames. */
const MAX_BLOCK_TOKENS = 8192;

/**
 * vLLM 0.33's hashes of a prompt's whole blocks (`hash_block_tokens` of
 * `v1/core/kv_cache_utils.py`), 32 bytes each. `extraKeys` is per block and may be shorter.
 * @throws `KV_REQUEST_INVALID` for an impossible block size.
 */
export function blockHashes(
  tokens: ArrayLike<number>,
  {
    blockSize,
    algorithm = "sha256",
    seed = DEFAULT_HASH_SEED,
    extraKeys = [],
    after,
  }: {
    /** Tokens in a block. */
    readonly blockSize: number;
    /** @default "sha256" */
    readonly algorithm?: BlockHashAlgorithm;
    /** @default DEFAULT_HASH_SEED */
    readonly seed?: string;
    /** @default none */
    readonly extraKeys?: readonly (readonly BlockHashKey[] | undefined)[];
    /** Hash of the block before the first. @default the beginning of a prompt */
    readonly after?: Uint8Array | undefined;
  },
): Uint8Array[] {
  if (!Number.isInteger(blockSize) || blockSize < 1 || blockSize > MAX_BLOCK_TOKENS)
    throw new KvError("KV_REQUEST_INVALID", `blocks of ${blockSize} tokens have no hashes`);
  const hashOf = (value: Value) =>
    createHash("sha256")
      .update(algorithm === "sha256" ? pickled(value) : cbor(value))
      .digest();

  let parent: Uint8Array = after ?? hashOf(seed);
  const whole = Math.floor(tokens.length / blockSize);
  return Array.from({ length: whole }, (_, block) => {
    const ids = Array.from({ length: blockSize }, (_, at) => tokens[block * blockSize + at] ?? 0);
    parent = hashOf([parent, ids, extraKeys[block] ?? null]);
    return parent;
  });
}

/** A block's key in vLLM's offloading tiers: hash and KV cache group. */
export function offloadKey(hash: Uint8Array, group = 0): Uint8Array {
  const key = Buffer.alloc(hash.length + 4);
  key.set(hash);
  key.writeUInt32BE(group, hash.length);
  return key;
}

/** `pickle.dumps(value, protocol=5)`, where equal strings are one object. */
function pickled(value: Value): Uint8Array {
  const body: Uint8Array[] = [];
  const memo = new Map<string, number>();
  let memoized = 0;
  const op = (code: number, ...bytes: number[]) => body.push(Uint8Array.of(code, ...bytes));
  const memoize = () => {
    memoized += 1;
    op(0x94);
  };
  const sized = (short: number, long: number, bytes: Uint8Array) => {
    if (bytes.length < 256) op(short, bytes.length);
    else body.push(Uint8Array.of(long), integer(bytes.length, 4));
    body.push(bytes);
    memoize();
  };
  const text = (given: string) => {
    const known = memo.get(given);
    if (known !== undefined) {
      op(0x68, known);
      return;
    }
    memo.set(given, memoized);
    sized(0x8c, 0x58, Buffer.from(given));
  };
  const put = (given: Value): void => {
    if (given === null) op(0x4e);
    else if (typeof given === "string") text(given);
    else if (typeof given === "number") body.push(pickledInteger(given));
    else if (given instanceof Uint8Array) sized(0x43, 0x42, given);
    else if (given.length === 0) op(0x29);
    else {
      const short = given.length <= 3;
      if (!short) op(0x28);
      for (const each of given) put(each);
      op(short ? 0x84 + given.length : 0x74);
      memoize();
    }
  };
  put(value);
  op(0x2e);
  const frame = Buffer.concat(body);
  return Buffer.concat([Uint8Array.of(0x80, 5, 0x95), integer(frame.length, 8), frame]);
}

function pickledInteger(value: number): Uint8Array {
  if (value >= 0 && value < 0x100) return Uint8Array.of(0x4b, value);
  if (value >= 0 && value < 0x1_0000)
    return Buffer.concat([Uint8Array.of(0x4d), integer(value, 2)]);
  if (value >= -(2 ** 31) && value < 2 ** 31)
    return Buffer.concat([Uint8Array.of(0x4a), integer(value, 4)]);
  // LONG1 is the shortest two's complement.
  let length = 5;
  while (Math.abs(value) >= 2 ** (8 * length - 1)) length += 1;
  return Buffer.concat([Uint8Array.of(0x8a, length), integer(value, length)]);
}

function integer(value: number, length: number): Uint8Array {
  const bytes = Buffer.alloc(8);
  bytes.writeBigInt64LE(BigInt(value));
  return bytes.subarray(0, length);
}

/** `cbor2.dumps(value, canonical=True)`. */
function cbor(value: Value): Uint8Array {
  if (value === null) return Uint8Array.of(0xf6);
  if (typeof value === "number") return value < 0 ? cborHead(1, -1 - value) : cborHead(0, value);
  if (typeof value === "string") {
    const bytes = Buffer.from(value);
    return Buffer.concat([cborHead(3, bytes.length), bytes]);
  }
  if (value instanceof Uint8Array) return Buffer.concat([cborHead(2, value.length), value]);
  return Buffer.concat([cborHead(4, value.length), ...value.map(cbor)]);
}

function cborHead(major: number, value: number): Uint8Array {
  const type = major << 5;
  if (value < 24) return Uint8Array.of(type | value);
  const size = value < 0x100 ? 1 : value < 0x1_0000 ? 2 : value < 2 ** 32 ? 4 : 8;
  const bytes = Buffer.alloc(9);
  bytes.writeBigUInt64BE(BigInt(value), 1);
  bytes[8 - size] = type | (24 + Math.log2(size));
  return bytes.subarray(8 - size);
}
