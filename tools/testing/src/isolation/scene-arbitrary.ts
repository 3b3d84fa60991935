import fc from "fast-check";
import { MOVES, type Scene } from "./isolation-scene.js";

/**
 * Random scenes: users, and what attackers do meanwhile. `atOnce`: some users send both legs at
 * once, for push.
 */
export function sceneArbitrary({ atOnce = false } = {}): fc.Arbitrary<Scene> {
  return fc.record({
    seed: fc.nat(),
    prefillTp: fc.constantFrom(1, 2),
    decodeTp: fc.constantFrom(1, 2),
    requests: fc.array(
      fc.record({
        atMs: fc.nat(60),
        waitMs: fc.nat(80),
        numTokens: fc.integer({ min: 1, max: 80 }),
        atOnce: atOnce ? fc.boolean() : fc.constant(false),
      }),
      { minLength: 1, maxLength: 4 },
    ),
    attacks: fc.array(
      fc.record({
        atMs: fc.nat(140),
        move: fc.constantFrom(...MOVES),
        victim: fc.nat(3),
        copies: fc.boolean(),
      }),
      { maxLength: 6 },
    ),
  });
}
