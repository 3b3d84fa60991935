/** IEEE half-precision bits to numbers. The result is exact. */
export function float16ToFloat32(from: Uint16Array): Float32Array {
  const to = new Float32Array(from.length);
  const words = new Uint32Array(to.buffer);
  for (let i = 0; i < from.length; i++) words[i] = widen(from[i] as number);
  return to;
}

/** The upper half of each float32: what bfloat16 is. The result is exact. */
export function bfloat16ToFloat32(from: Uint16Array): Float32Array {
  const to = new Float32Array(from.length);
  const words = new Uint32Array(to.buffer);
  for (let i = 0; i < from.length; i++) words[i] = (from[i] as number) << 16;
  return to;
}

/** Rounds to the nearest half-precision value, ties to even; too large becomes infinity. */
export function float32ToFloat16(from: Float32Array): Uint16Array {
  const to = new Uint16Array(from.length);
  const words = new Uint32Array(from.buffer, from.byteOffset, from.length);
  for (let i = 0; i < from.length; i++) to[i] = narrow(words[i] as number);
  return to;
}

function widen(half: number): number {
  const sign = (half & 0x8000) << 16;
  const exponent = (half >>> 10) & 0x1f;
  const fraction = half & 0x3ff;
  if (exponent === 0x1f) return sign | 0x7f800000 | (fraction << 13);
  if (exponent !== 0) return sign | ((exponent + 112) << 23) | (fraction << 13);
  if (fraction === 0) return sign;
  // A subnormal half is a normal float32: move its leading one to the hidden bit.
  const shift = Math.clz32(fraction) - 21;
  return sign | ((113 - shift) << 23) | (((fraction << shift) & 0x3ff) << 13);
}

function narrow(word: number): number {
  const sign = (word >>> 16) & 0x8000;
  const magnitude = word & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;
  if (magnitude >= 0x38800000) {
    const odd = (magnitude >>> 13) & 1;
    return sign | ((magnitude - 0x38000000 + 0xfff + odd) >>> 13);
  }
  const shift = 126 - (magnitude >>> 23);
  if (shift > 24) return sign;
  const fraction = (magnitude & 0x7fffff) | 0x800000;
  const kept = fraction >>> shift;
  const rest = fraction & ((1 << shift) - 1);
  const half = 1 << (shift - 1);
  return sign | (kept + (rest > half || (rest === half && (kept & 1) === 1) ? 1 : 0));
}
