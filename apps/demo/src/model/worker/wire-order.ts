import type { KvGeometry } from "../../engine/cache/kv-layout.js";

/**
 * Keys and values of one layer in the model's own order, each `[kv_head][token][head_dim]`. Wire
 * order, as it is sent between threads and stored in the pool, is float32
 * `[layer][kv_head][token][2 * head_dim]`, key and then value.
 */
export interface LayerKv {
  key: Float32Array;
  value: Float32Array;
}

/** Takes the tokens `[from, to)` out of layers that hold `total` tokens each. */
export function packWire(
  layers: readonly LayerKv[],
  {
    kvHeads,
    headDim,
    total,
    from,
    to,
  }: { kvHeads: number; headDim: number; total: number; from: number; to: number },
): ArrayBuffer {
  const tokens = to - from;
  const wire = new Float32Array(layers.length * kvHeads * tokens * 2 * headDim);
  let target = 0;
  for (const { key, value } of layers) {
    for (let head = 0; head < kvHeads; head++) {
      let source = (head * total + from) * headDim;
      for (let token = 0; token < tokens; token++) {
        wire.set(key.subarray(source, source + headDim), target);
        wire.set(value.subarray(source, source + headDim), target + headDim);
        source += headDim;
        target += 2 * headDim;
      }
    }
  }
  return wire.buffer;
}

/** The inverse: `tokens` tokens of wire order as one pair of arrays per layer. */
export function unpackWire(
  buffer: ArrayBuffer,
  { layers, kvHeads, headDim }: KvGeometry,
  tokens: number,
): LayerKv[] {
  const wire = new Float32Array(buffer);
  const rows = kvHeads * tokens;
  return Array.from({ length: layers }, (_, layer) => {
    const key = new Float32Array(rows * headDim);
    const value = new Float32Array(rows * headDim);
    for (let row = 0; row < rows; row++) {
      const source = (layer * rows + row) * 2 * headDim;
      key.set(wire.subarray(source, source + headDim), row * headDim);
      value.set(wire.subarray(source + headDim, source + 2 * headDim), row * headDim);
    }
    return { key, value };
  });
}
