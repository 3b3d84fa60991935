const stateLength = 624;
const middle = 397;

/** The 32-bit Mersenne Twister (MT19937), seeded by one 32-bit integer as `torch.manual_seed` seeds its CPU generator. */
export interface Mt19937 {
  /** The next 32 random bits, unsigned. */
  next(): number;
  /** Moves on by `count` draws without producing them. */
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
