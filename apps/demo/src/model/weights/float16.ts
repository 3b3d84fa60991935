export function float16ToFloat32(from: Uint16Array): Float32Array {
  return new Float32Array(from).map((half) => {
    const sign = half & 0x8000 ? -1 : 1;
    const exponent = (half >>> 10) & 0x1f;
    const fraction = half & 0x3ff;
    if (exponent === 0x1f) return fraction === 0 ? sign * Number.POSITIVE_INFINITY : Number.NaN;
    if (exponent === 0) return sign * fraction * 2 ** -24;
    return sign * (0x400 + fraction) * 2 ** (exponent - 25);
  });
}

/** The upper half of each float32: what bfloat16 is. The result is exact. */
export function bfloat16ToFloat32(from: Uint16Array): Float32Array {
  return new Float32Array(new Uint32Array(from).map((half) => half << 16).buffer);
}

/** Rounds to the nearest half-precision value, ties to even; too large becomes infinity. */
export function float32ToFloat16(from: Float32Array): Uint16Array {
  const words = new Uint32Array(from.buffer, from.byteOffset, from.length);
  const halves = words.map((word) => {
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
  });
  return new Uint16Array(halves);
}
