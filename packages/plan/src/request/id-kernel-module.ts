// The WebAssembly binary format (version 1), as far as one small module needs it. Each function is one rule of the format.

/** Unsigned LEB128. */
function unsigned(value: number): number[] {
  const bytes: number[] = [];
  let rest = value;
  do {
    const low = rest % 128;
    rest = Math.floor(rest / 128);
    bytes.push(rest > 0 ? low + 128 : low);
  } while (rest > 0);
  return bytes;
}

/** A byte vector with its length before it. */
function sized(bytes: readonly number[]): number[] {
  return [...unsigned(bytes.length), ...bytes];
}

/** A vector of items, each already encoded, with their number before them. */
function vector(items: readonly (readonly number[])[]): number[] {
  return [...unsigned(items.length), ...items.flat()];
}

function name(text: string): number[] {
  return sized([...text].map((letter) => letter.charCodeAt(0)));
}

function section(id: number, content: readonly number[]): number[] {
  return [id, ...sized(content)];
}

const SECTION = { type: 1, function: 3, memory: 5, export: 7, code: 10 } as const;
const I32 = 0x7f;
const FUNCTION_TYPE = 0x60;
const EXPORT_FUNCTION = 0x00;
const EXPORT_MEMORY = 0x02;

const MAGIC_AND_VERSION = [0x00, 0x61, 0x73, 0x6d, 0x01, 0x00, 0x00, 0x00];

function moduleBytes(sections: readonly (readonly number[])[]): Uint8Array {
  return Uint8Array.from([...MAGIC_AND_VERSION, ...sections.flat()]);
}

// Parameters and locals of `expand`, by index.
const IDS = 0;
const COUNT = 1;
const OFFSETS = 2;
const OFFSETS_END = 3;
const OUT = 4;
const CURSOR = 5;
const IDS_END = 6;

const get = (local: number) => [0x20, local];
const set = (local: number) => [0x21, local];
const tee = (local: number) => [0x22, local];
const constant = (value: number) => [0x41, ...unsigned(value)]; // only small positive values, so the sign bit stays clear
const ADD = [0x6a];
const SUBTRACT = [0x6b];
const LESS = [0x49]; // i32.lt_u
const SHIFT_LEFT = [0x74];
const LOOP = [0x03, 0x40];
const END = [0x0b];
const branchIf = (depth: number) => [0x0d, depth];
const simd = (opcode: number) => [0xfd, ...unsigned(opcode)];
// Alignment 2^2: ids are 4-byte aligned, not 16-byte; offset 0.
const MEMORY_ARGUMENT = [0x02, 0x00];
const LOAD_SPLAT = [...simd(0x09), ...MEMORY_ARGUMENT]; // v128.load32_splat
const LOAD = [...simd(0x00), ...MEMORY_ARGUMENT]; // v128.load
const STORE = [...simd(0x0b), ...MEMORY_ARGUMENT]; // v128.store
const ADD_LANES = simd(0xae); // i32x4.add
const V128 = 0x7b;
const OFFSET_LANES = 7;

/**
 * `expand(ids, count, offsets, offsetsEnd, out)`, all byte addresses but `count`; one id and one offset at least:
 *
 *     for each offset: for each id: *out++ = offset + id
 *
 * in steps of four ids. The last step of an offset may write up to three ids too many; the next offset overwrites
 * them, and the caller leaves 12 bytes of room after the last.
 */
function expandBody(): number[] {
  return [
    ...get(IDS),
    ...get(COUNT),
    ...constant(2),
    ...SHIFT_LEFT,
    ...ADD,
    ...set(IDS_END),
    ...LOOP, // over offsets
    ...get(OFFSETS),
    ...LOAD_SPLAT,
    ...set(OFFSET_LANES),
    ...get(IDS),
    ...set(CURSOR),
    ...LOOP, // over ids, four at a time
    ...get(OUT),
    ...get(CURSOR),
    ...LOAD,
    ...get(OFFSET_LANES),
    ...ADD_LANES,
    ...STORE,
    ...get(OUT),
    ...constant(16),
    ...ADD,
    ...set(OUT),
    ...get(CURSOR),
    ...constant(16),
    ...ADD,
    ...tee(CURSOR),
    ...get(IDS_END),
    ...LESS,
    ...branchIf(0),
    ...END,
    // Step back over what the last four wrote too many.
    ...get(OUT),
    ...get(IDS_END),
    ...ADD,
    ...get(CURSOR),
    ...SUBTRACT,
    ...set(OUT),
    ...get(OFFSETS),
    ...constant(4),
    ...ADD,
    ...tee(OFFSETS),
    ...get(OFFSETS_END),
    ...LESS,
    ...branchIf(0),
    ...END,
    ...END,
  ];
}

/** A module with one memory of `pages` (64 KiB each) and the function above as `expand`. */
export function idKernelModule(pages: number): Uint8Array {
  const locals = vector([
    [2, I32],
    [1, V128],
  ]);
  return moduleBytes([
    section(
      SECTION.type,
      vector([[FUNCTION_TYPE, ...vector([[I32], [I32], [I32], [I32], [I32]]), ...vector([])]]),
    ),
    section(SECTION.function, vector([[0]])),
    section(SECTION.memory, vector([[0x00, ...unsigned(pages)]])),
    section(
      SECTION.export,
      vector([
        [...name("memory"), EXPORT_MEMORY, 0],
        [...name("expand"), EXPORT_FUNCTION, 0],
      ]),
    ),
    section(SECTION.code, vector([sized([...locals, ...expandBody()])])),
  ]);
}
