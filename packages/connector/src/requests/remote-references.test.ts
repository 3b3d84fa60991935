import { manualClock } from "@kv/testing/manual-clock";
import { expect, test } from "vitest";
import { RemoteReferences, type RemoteRequest } from "./references.js";

const REFERENCE: RemoteRequest = {
  engineId: "p",
  host: "p",
  port: 5600,
  tpSize: 1,
  dcpSize: 1,
  ppSize: 1,
  registrationGeneration: 3,
  requestId: "cmpl-1",
};
const setUp = ({ maxReaders = 2, maxReferences = 3 } = {}) => {
  const clock = manualClock(0);
  return {
    clock,
    references: new RemoteReferences({ clock, rememberMs: 1000, maxReaders, maxReferences }),
  };
};
const code = (act: () => void): string => {
  try {
    act();
    return "ok";
  } catch (error) {
    return (error as { code: string }).code;
  }
};

test("the last of several readers releases, and a released reference is refused for the time that it is remembered", () => {
  const { clock, references } = setUp();
  const first = references.add(REFERENCE);
  const second = references.add(REFERENCE);
  expect(code(() => references.add(REFERENCE))).toBe("KV_REFERENCE_USED");
  expect([references.remove(first), references.remove(second)]).toEqual([false, true]);
  clock.advance(999);
  expect(code(() => references.add(REFERENCE))).toBe("KV_REFERENCE_USED");
  expect(references.remove(second)).toBe(false);
  clock.advance(1);
  expect(code(() => references.add(REFERENCE))).toBe("ok");
});

test("H7: a vLLM P's blocks, in use or released, are refused under another name; another lease's are not", () => {
  const { clock, references } = setUp({ maxReferences: 10 });
  const plain = { ...REFERENCE, blocks: "b", expirySeconds: 77.25 };
  const forged = [
    { registrationGeneration: 4 },
    { registrationGeneration: undefined, requestId: "cmpl-2" },
    { requestId: "cmpl-2" },
  ].map((change) => ({ ...plain, ...change }));
  const reader = references.add(plain);
  const outcomes = () => [plain, ...forged].map((each) => code(() => references.add(each)));
  const used = "KV_REFERENCE_USED";
  expect(outcomes()).toEqual(["ok", used, used, used]);
  references.remove(reader);
  references.remove(reader);
  expect(outcomes()).toEqual([used, used, used, used]);
  for (const [n, other] of [{ expirySeconds: 78 }, { blocks: "c" }, { engineId: "q" }].entries())
    expect(code(() => references.add({ ...plain, ...other, requestId: `other-${n}` }))).toBe("ok");
  clock.advance(1000);
  expect(outcomes()).toEqual(["ok", used, used, used]);
});

test("a full list refuses new references, and forgets none early", () => {
  const { clock, references } = setUp();
  const reference = (n: number) => ({ ...REFERENCE, requestId: `cmpl-${n}` });
  const added = [1, 2, 3].map((n) => references.add(reference(n)));
  for (const used of added.slice(0, 2)) references.remove(used);
  expect(code(() => references.add(reference(4)))).toBe("KV_REFERENCES_FULL");
  // A reference that is in use needs no more room.
  expect(code(() => references.add(reference(3)))).toBe("ok");
  for (const n of [1, 2])
    expect(code(() => references.add(reference(n)))).toBe("KV_REFERENCE_USED");
  clock.advance(1000);
  expect([4, 1].map((n) => code(() => references.add(reference(n))))).toEqual(["ok", "ok"]);
  expect(code(() => references.add(reference(2)))).toBe("KV_REFERENCES_FULL");
});

test("the next registration of P's cache, another process and another capability make another reference; another address does not", () => {
  const { references } = setUp({ maxReferences: 10 });
  const lease = { incarnation: "i", generation: 1, capability: "c".repeat(22) };
  for (const used of [REFERENCE, { ...REFERENCE, requestId: "own", lease }]) {
    references.remove(references.add(used));
  }
  const again = (change: Partial<RemoteRequest>) =>
    code(() => references.add({ ...REFERENCE, ...change }));
  expect(again({ host: "other", port: 1, tpSize: 2 })).toBe("KV_REFERENCE_USED");
  expect(again({ registrationGeneration: 0 })).toBe("KV_REFERENCE_USED");
  expect(again({ registrationGeneration: 4 })).toBe("ok");
  expect(again({ registrationGeneration: 3 })).toBe("ok");
  const own = (change: object) => again({ requestId: "own", lease: { ...lease, ...change } });
  expect(own({})).toBe("KV_REFERENCE_USED");
  expect(
    [{ incarnation: "j" }, { generation: 2 }, { capability: "d".repeat(22) }].map(own),
  ).toEqual(["ok", "ok", "ok"]);
});
