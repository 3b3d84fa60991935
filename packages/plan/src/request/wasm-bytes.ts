/** Just enough of the WebAssembly binary format (version 1) to write a small module by hand, each function one rule of the format. */

/** Unsigned LEB128. */
export function unsigned(value: number): number[] {
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
export function sized(bytes: readonly number[]): number[] {
  return [...unsigned(bytes.length), ...bytes];
}

/** A vector of items, each already encoded, with their number before them. */
export function vector(items: readonly (readonly number[])[]): number[] {
  return [...unsigned(items.length), ...items.flat()];
}

export function name(text: string): number[] {
  return sized([...text].map((letter) => letter.charCodeAt(0)));
}

export function section(id: number, content: readonly number[]): number[] {
  return [id, ...sized(content)];
}

export const SECTION = { type: 1, function: 3, memory: 5, export: 7, code: 10 } as const;
export const I32 = 0x7f;
export const FUNCTION_TYPE = 0x60;
export const EXPORT_FUNCTION = 0x00;
export const EXPORT_MEMORY = 0x02;

const MAGIC_AND_VERSION = [0x00, 0x61, 0x73, 0x6d, 0x01, 0x00, 0x00, 0x00];

export function moduleBytes(sections: readonly (readonly number[])[]): Uint8Array {
  return Uint8Array.from([...MAGIC_AND_VERSION, ...sections.flat()]);
}
