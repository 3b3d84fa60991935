import { idKernelModule } from "./id-kernel-module.js";

/** Writes `offset + id` for each offset and, within it, each id, to `out` from `at` on; answers the position after the last. */
export type IdKernel = (out: Int32Array, at: number, ids: Int32Array, offsets: Int32Array) => number;

/** Block ids, and the offsets at which they are written out, one after another. */
export type IdPart = readonly [ids: readonly number[], offsets: readonly number[]];

/** Writes parts out one after another. */
export type IdWriter = (parts: readonly IdPart[]) => Int32Array;

/** For runtimes without WebAssembly SIMD, and for short lists, where copies in and out of the module cost more than they save. */
export const scalarIdKernel: IdKernel = (out, at, ids, offsets) => {
  let cursor = at;
  for (const offset of offsets) {
    for (let index = 0; index < ids.length; index++) out[cursor++] = offset + (ids[index] as number);
  }
  return cursor;
};

// The part of the JavaScript API that is used; not every TypeScript `lib` declares it.
interface WebAssemblyApi {
  Module: new (bytes: Uint8Array) => object;
  Instance: new (module: object) => { exports: Record<string, unknown> };
  validate(bytes: Uint8Array): boolean;
}

const PAGES = 20;
const PAGE_BYTES = 65_536;
/** Ids and offsets taken in one call of the module; the output of a call fits behind them in a second-level cache. */
const MAX_IDS = 32_768;
const MAX_OFFSETS = 4_096;
const IDS_AT = 0;
const OFFSETS_AT = MAX_IDS * 4 + 16;
const OUT_AT = OFFSETS_AT + MAX_OFFSETS * 4;
const MAX_OUT = Math.floor((PAGES * PAGE_BYTES - OUT_AT) / 4) - 3;

interface KernelExports {
  readonly memory: { readonly buffer: ArrayBuffer; grow(pages: number): number };
  readonly expand: (ids: number, count: number, offsets: number, offsetsEnd: number, out: number) => void;
}

function instantiate(pages: number): KernelExports | undefined {
  const api = (globalThis as { WebAssembly?: WebAssemblyApi }).WebAssembly;
  const bytes = idKernelModule(pages);
  if (!api?.validate(bytes)) return undefined;
  return new api.Instance(new api.Module(bytes)).exports as unknown as KernelExports;
}

/** The kernel in WebAssembly SIMD; undefined where the runtime has none. */
export function createSimdIdKernel(): IdKernel | undefined {
  const kernel = instantiate(PAGES);
  if (kernel === undefined) return undefined;
  const { memory, expand } = kernel;
  const words = new Int32Array(memory.buffer);
  const small = (out: Int32Array, at: number, ids: Int32Array, offsets: Int32Array) => {
    const perCall = Math.min(MAX_OFFSETS, Math.floor(MAX_OUT / ids.length));
    words.set(ids, IDS_AT / 4);
    let cursor = at;
    for (let first = 0; first < offsets.length; first += perCall) {
      const part = offsets.subarray(first, first + perCall);
      words.set(part, OFFSETS_AT / 4);
      expand(IDS_AT, ids.length, OFFSETS_AT, OFFSETS_AT + part.length * 4, OUT_AT);
      const length = part.length * ids.length;
      out.set(words.subarray(OUT_AT / 4, OUT_AT / 4 + length), cursor);
      cursor += length;
    }
    return cursor;
  };
  return (out, at, ids, offsets) => {
    if (ids.length === 0) return at;
    if (ids.length <= MAX_IDS) return small(out, at, ids, offsets);
    // Longer lists are cut, and each piece put in its place for one offset at a time.
    let cursor = at;
    for (let region = 0; region < offsets.length; region++) {
      for (let first = 0; first < ids.length; first += MAX_IDS) {
        cursor = small(
          out,
          cursor,
          ids.subarray(first, first + MAX_IDS),
          offsets.subarray(region, region + 1),
        );
      }
    }
    return cursor;
  };
}

/**
 * Writes where the kernel computes, so that nothing is copied and no fresh memory is touched: what a call answers holds until the next call.
 * Undefined where the runtime has no WebAssembly SIMD.
 */
export function createSimdIdWriter(): IdWriter | undefined {
  const kernel = instantiate(1);
  if (kernel === undefined) return undefined;
  const { memory, expand } = kernel;
  let words = new Int32Array(memory.buffer);
  return (parts) => {
    let [most, mostOffsets, length] = [0, 0, 0];
    for (const [ids, offsets] of parts) {
      most = Math.max(most, ids.length);
      mostOffsets = Math.max(mostOffsets, offsets.length);
      length += ids.length * offsets.length;
    }
    // The kernel takes ids four at a time, and writes as many.
    const offsetsAt = most + 4;
    const outAt = offsetsAt + mostOffsets;
    const missing = outAt + length + 4 - words.length;
    if (missing > 0) {
      memory.grow(Math.ceil((missing * 4) / PAGE_BYTES));
      words = new Int32Array(memory.buffer);
    }
    let cursor = outAt;
    for (const [ids, offsets] of parts) {
      if (ids.length === 0 || offsets.length === 0) continue;
      put(words, 0, ids);
      put(words, offsetsAt, offsets);
      expand(0, ids.length, offsetsAt * 4, (offsetsAt + offsets.length) * 4, cursor * 4);
      cursor += ids.length * offsets.length;
    }
    return words.subarray(outAt, outAt + length);
  };
}

/** Into a new array of its own. */
export const writeIds: IdWriter = (parts) => {
  const out = new Int32Array(parts.reduce((sum, [ids, offsets]) => sum + ids.length * offsets.length, 0));
  let cursor = 0;
  for (const [ids, offsets] of parts) cursor = expandIds(out, cursor, integers(ids), integers(offsets));
  return out;
};

/** `Int32Array.from` asks an iterator for each of them. */
function integers(values: readonly number[]): Int32Array {
  const out = new Int32Array(values.length);
  put(out, 0, values);
  return out;
}

function put(out: Int32Array, at: number, values: readonly number[]): void {
  for (let index = 0; index < values.length; index++) out[at + index] = values[index] as number;
}

const WORTH_A_CALL = 256;
let simd: IdKernel | undefined | "untried" = "untried";

/** The faster of the two for the size at hand. */
export const expandIds: IdKernel = (out, at, ids, offsets) => {
  if (ids.length * offsets.length < WORTH_A_CALL) return scalarIdKernel(out, at, ids, offsets);
  if (simd === "untried") simd = createSimdIdKernel();
  return (simd ?? scalarIdKernel)(out, at, ids, offsets);
};
