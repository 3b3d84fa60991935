import fc from "fast-check";
import { expect, test } from "vitest";
import { decodePrompt, encodePrompt, promptContent, promptDigest } from "./transfer-params.js";

const tokens = fc.array(fc.nat(0x7fff_ffff), { maxLength: 40 });
const key = fc.option(fc.string({ maxLength: 8 }), { nil: undefined });

test("prompts have equal digests at a length when they begin with the same tokens and have the same content key", () => {
  fc.assert(
    fc.property(tokens, tokens, key, key, fc.nat(40), (a, b, keyA, keyB, numTokens) => {
      const digest = (promptTokenIds: number[], contentKey: string | undefined) =>
        promptDigest(promptContent({ promptTokenIds, contentKey }) ?? expect.fail(), numTokens);
      const isSame =
        keyA === keyB &&
        Math.min(a.length, b.length) >= numTokens &&
        a.slice(0, numTokens).join() === b.slice(0, numTokens).join();
      expect(digest(a, keyA) !== undefined).toBe(a.length >= numTokens);
      if (a.length >= numTokens) expect(digest(a, keyA) === digest(b, keyB)).toBe(isSame);
    }),
  );
});

test("the encoded form is plain data of the same prompt", () => {
  fc.assert(
    fc.property(tokens, key, (promptTokenIds, contentKey) => {
      const content = promptContent({ promptTokenIds, contentKey }) ?? expect.fail();
      expect(decodePrompt(JSON.parse(JSON.stringify(encodePrompt(content))))).toEqual(content);
    }),
  );
});

test("an engine that does not know its tokens has no content, and one with malformed tokens is refused", () => {
  expect(promptContent({ contentKey: "a" })).toBeUndefined();
  for (const id of [-1, 0.5, 2 ** 31, 2 ** 32 + 1, Number.NaN]) {
    expect(() => promptContent({ promptTokenIds: [1, id] })).toThrow(
      expect.objectContaining({
        code: "KV_REQUEST_INVALID",
        message: expect.stringContaining(`${id}`),
      }),
    );
  }
});
