/**
 * Fills with normal values exactly as PyTorch 2 does on an x86 CPU with AVX2 (`Tensor.normal_` on a
 * contiguous float32 tensor of a multiple of 16 elements): uniforms of 24 bits first, then
 * Box-Muller on groups of 16, the first eight giving the radius and the last eight the angle.
 * Logarithm, sine and cosine are the single-precision approximations of the Cephes library with
 * fused multiply-adds where the compiler puts them, so that the result is equal to the last bit.
 *
 * @throws RangeError when the length is not a multiple of 16 (PyTorch then draws the tail again; no
 * model here needs it).
 */
export function fillNormal(
  data: Float32Array,
  random: Mt19937,
  { mean = 0, std }: { mean?: number; std: number },
): void {
  if (data.length % 16 !== 0) throw new RangeError(`length ${data.length} is not a multiple of 16`);
  for (let i = 0; i < data.length; i++) data[i] = (random.next() & 0xffffff) * 2 ** -24;
  const scale = fround(std);
  const shift = fround(mean);
  for (let group = 0; group < data.length; group += 16) {
    for (let j = group; j < group + 8; j++) {
      const radius = fround(Math.sqrt(fround(-2 * log(fround(1 - (data[j] ?? 0))))));
      sineAndCosine(fround(twoPi * (data[j + 8] ?? 0)));
      data[j] = fround(fround(radius * cosine) * scale + shift);
      data[j + 8] = fround(fround(radius * sine) * scale + shift);
    }
  }
}

const fround = Math.fround;
const twoPi = fround(2 * Math.PI);

const bits = new Int32Array(1);
const real = new Float32Array(bits.buffer);

const halfRoot = fround(Math.SQRT1_2);
const logLow = fround(-2.1219444e-4);
const logHigh = fround(0.693359375);
const [l0, l1, l2, l3, l4, l5, l6, l7, l8] = [
  7.0376836292e-2, -1.151461031e-1, 1.167699874e-1, -1.2420140846e-1, 1.4249322787e-1,
  -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
].map(fround) as [number, number, number, number, number, number, number, number, number];

/**
 * Natural logarithm of a normal float32 in (0, 1]. A product of two float32 is exact in a double:
 * fround(a * b + c) is fma.
 */
function log(value: number): number {
  real[0] = value;
  const word = bits[0] ?? 0;
  let exponent = (word >>> 23) - 126;
  bits[0] = (word & 0x007fffff) | 0x3f000000;
  let x = real[0];
  if (x < halfRoot) {
    exponent -= 1;
    x = fround(fround(x - 1) + x);
  } else x = fround(x - 1);
  const z = fround(x * x);
  let y = fround(l0 * x + l1);
  y = fround(y * x + l2);
  y = fround(y * x + l3);
  y = fround(y * x + l4);
  y = fround(y * x + l5);
  y = fround(y * x + l6);
  y = fround(y * x + l7);
  y = fround(y * x + l8);
  y = fround(fround(y * x) * z + fround(exponent * logLow));
  y = fround(y - z * 0.5);
  return fround(exponent * logHigh + fround(x + y));
}

const fourOverPi = fround(4 / Math.PI);
// Pi/4 in three parts, so that the argument is reduced without losing the low bits.
const p1 = fround(-0.78515625);
const p2 = fround(-2.4187564849853516e-4);
const p3 = fround(-3.774894977445941e-8);
const [s0, s1, s2] = [-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1].map(fround) as [
  number,
  number,
  number,
];
const [c0, c1, c2] = [2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2].map(
  fround,
) as [number, number, number];

// Module variables avoid an object per call: there are three million calls.
let sine = 0;
let cosine = 0;

/** Sets `sine` and `cosine` of an angle in [0, 2 pi). */
function sineAndCosine(angle: number): void {
  const octant = (Math.trunc(fround(angle * fourOverPi)) + 1) & ~1;
  let x = fround(octant * p1 + angle);
  x = fround(octant * p2 + x);
  x = fround(octant * p3 + x);
  const z = fround(x * x);
  let c = fround(c0 * z + c1);
  c = fround(c * z + c2);
  c = fround(fround(c * z) * z - fround(z * 0.5));
  c = fround(c + 1);
  let s = fround(s0 * z + s1);
  s = fround(s * z + s2);
  s = fround(fround(s * z) * x + x);
  const swapped = (octant & 2) !== 0;
  sine = swapped ? c : s;
  cosine = swapped ? s : c;
  if (octant & 4) sine = -sine;
  if (~(octant - 2) & 4) cosine = -cosine;
}

const stateLength = 624;
const middle = 397;

/**
 * The 32-bit Mersenne Twister (MT19937), seeded by one 32-bit integer as `torch.manual_seed` seeds
 * its CPU generator.
 */
export interface Mt19937 {
  next(): number;
  skip(count: number): void;
}

export function mt19937(seed: number): Mt19937 {
  const state = new Uint32Array(stateLength);
  state[0] = seed >>> 0;
  for (let i = 1; i < stateLength; i++) {
    const before = state[i - 1] ?? 0;
    state[i] = Math.imul(1812433253, before ^ (before >>> 30)) + i;
  }
  let position = stateLength;

  return {
    next() {
      if (position === stateLength) {
        twist(state);
        position = 0;
      }
      let y = state[position++] ?? 0;
      y ^= y >>> 11;
      y ^= (y << 7) & 0x9d2c5680;
      y ^= (y << 15) & 0xefc60000;
      y ^= y >>> 18;
      return y >>> 0;
    },
    skip(count) {
      let target = position + count;
      for (; target > stateLength; target -= stateLength) twist(state);
      position = target;
    },
  };
}

function twist(state: Uint32Array): void {
  for (let i = 0; i < stateLength; i++) {
    const low = state[i + 1 < stateLength ? i + 1 : 0] ?? 0;
    const joined = ((state[i] ?? 0) & 0x80000000) | (low & 0x7fffffff);
    const far = state[i + middle < stateLength ? i + middle : i + middle - stateLength] ?? 0;
    state[i] = far ^ (joined >>> 1) ^ (low & 1 ? 0x9908b0df : 0);
  }
}
