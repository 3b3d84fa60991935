import { expect, test } from "vitest";
import { z } from "zod";
import { unknownKeys } from "./unknown-keys.js";

const schema = z.strictObject({
  port: z.number().optional(),
  limits: z.strictObject({ connections: z.number().optional() }).prefault({}),
});

test.each([
  [{ prot: 1 }, 'there is no key "prot", did you mean port?'],
  [{ conections: 1 }, 'there is no key "conections", did you mean limits.connections?'],
  [{ limits: { conections: 1 } }, 'there is no key "conections", did you mean connections?'],
  [{ zzz: 1 }, 'there is no key "zzz"'],
  [{ a: 1, b: 1, c: 1, d: 1, e: 1 }, /^there is no key "a"; .*"c"; and 2 more$/],
])(
  "first-contact.md 3: %j is refused with the nearest key, where one is near",
  (value, message) => {
    const { error } = schema.safeParse(value, { error: unknownKeys });
    const found = error?.issues[0]?.message;
    if (typeof message === "string") expect(found).toBe(message);
    else expect(found).toMatch(message);
  },
);

test("first-contact.md 3: names of any length are cut", () => {
  const { error } = schema.safeParse({ ["x".repeat(1e6)]: 1 }, { error: unknownKeys });
  expect(error?.issues[0]?.message.length).toBeLessThan(200);
});
