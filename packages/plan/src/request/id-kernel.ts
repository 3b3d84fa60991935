import { idKernelModule } from "./id-kernel-module.js";

/** Writes `offset + id` for each offset and, within an offset, each id, to `out` from `at` on. Returns the position after the last id. */
export type IdKernel = (out: Int32Array, at: number, ids: Int32Array, offsets: Int32Array) => number;

/** For runtimes without WebAssembly SIMD, and for short lists, where copies in and out of the module cost more than they save. */
export const scalarIdKernel: IdKernel = (out, at, ids, offsets) => {
  let cursor = at;
  for (const offset of offsets) {
    for (let index = 0; index < ids.length; index++) out[cursor++] = offset + (ids[index] as number);
  }
  return cursor;
};

// The part of the WebAssembly API that this file uses; not every TypeScript `lib` declares it.
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
  readonly memory: { readonly buffer: ArrayBuffer };
  readonly expand: (ids: number, count: number, offsets: number, offsetsEnd: number, out: number) => void;
}

function instantiate(): KernelExports | undefined {
  const api = (globalThis as { WebAssembly?: WebAssemblyApi }).WebAssembly;
  const bytes = idKernelModule(PAGES);
  if (!api?.validate(bytes)) return undefined;
  return new api.Instance(new api.Module(bytes)).exports as unknown as KernelExports;
}

/** The kernel in WebAssembly SIMD; undefined where the runtime has no WebAssembly SIMD. */
export function createSimdIdKernel(): IdKernel | undefined {
  const kernel = instantiate();
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
    // Longer lists are cut, and each piece is written for one offset at a time.
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

/** Ids below which a call of the module costs more than it saves. */
const WORTH_A_CALL = 256;

/** The kernel for long lists. Undefined until the first of them; the benchmark puts the plain loop in its place. */
export const longLists: { kernel: IdKernel | undefined } = { kernel: undefined };

/** The faster kernel for the number of ids. */
export const expandIds: IdKernel = (out, at, ids, offsets) => {
  if (ids.length * offsets.length < WORTH_A_CALL) return scalarIdKernel(out, at, ids, offsets);
  longLists.kernel ??= createSimdIdKernel() ?? scalarIdKernel;
  return longLists.kernel(out, at, ids, offsets);
};
