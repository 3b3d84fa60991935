import type { Registration } from "@kv/protocol";
import { manualClock } from "@kv/testing/manual-clock";
import { expect, test } from "vitest";
import {
  MAX_WAITING_BYTES,
  ProducedRequests,
  RegistrationMatcher,
  registrationKey,
} from "./registrations.js";

const registration = (engineId: string, at: number, blocks: number): Registration => ({
  wireId: `r${at}`,
  matchId: `r${at}`,
  engineId,
  host: "h",
  port: 1,
  tpSize: 1,
  blockIds: [new Array<number>(blocks)],
  producerEngineId: "p",
});

function matcher() {
  const clock = manualClock();
  const requests = new ProducedRequests({ clock });
  const waitMs = { plain: 1000, own: 1000 };
  return { clock, matcher: new RegistrationMatcher({ clock, requests, waitMs, onExpired() {} }) };
}

test("A9: waiting registrations are weighed: those of the engine that holds most lose their room, the oldest first", () => {
  const { clock, matcher: waiting } = matcher();
  const wait = (one: Registration) =>
    waiting.wait(registrationKey(one), one).map(([, lost]) => lost);
  const honest = registration("honest", 0, 1000);
  expect(wait(honest)).toEqual([]);
  const blocks = Math.floor(MAX_WAITING_BYTES / 8 / 10);
  const lost: Registration[] = [];
  for (let at = 1; at <= 100; at += 1) lost.push(...wait(registration("hostile", at, blocks)));
  expect(lost).toHaveLength(91);
  expect(lost.map(({ wireId }) => wireId)).toEqual(lost.map((_, at) => `r${at + 1}`));
  expect(waiting.isWaiting(registrationKey(honest))).toBe(true);
  // One that is larger than all room is not kept.
  const huge = registration("other", 0, 10 * blocks + 1);
  expect(wait(huge)).toContain(huge);
  // Their room comes back.
  clock.advance(1000);
  expect(waiting.size).toBe(0);
  for (let at = 1; at <= 9; at += 1) expect(wait(registration("honest", at, blocks))).toEqual([]);
});

test("two registrations have one key only where they are of one rank, request, use, process and engine", () => {
  const own = {
    rank: 0,
    incarnation: "d",
    generation: 1,
    oldestOpen: 1,
    secret: "s",
    numTokens: 16,
    promptDigest: undefined,
    computedBlocks: [0],
  };
  const first = { ...registration("d", 1, 1), own };
  const changes: Partial<Registration>[] = [
    { engineId: "e" },
    { wireId: "r2" },
    ...[{ rank: 1 }, { incarnation: "e" }, { generation: 2 }, { secret: "t" }].map((change) => ({
      own: { ...own, ...change },
    })),
  ];
  const keys = [first, ...changes.map((change) => ({ ...first, ...change }))].map(registrationKey);
  expect(new Set(keys).size).toBe(keys.length);
  expect(registrationKey({ ...first, blockIds: [[7]] })).toBe(keys[0]);
});
