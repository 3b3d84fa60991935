import { expect, test } from "vitest";
import { KV_ERROR_CODES, KvError, settleAll } from "./index.js";

test("codes have the form KV_<AREA>_<CONDITION> and are unique", () => {
  for (const code of KV_ERROR_CODES) expect(code).toMatch(/^KV(_[A-Z]+){1,}$/);
  expect(new Set(KV_ERROR_CODES).size).toBe(KV_ERROR_CODES.length);
});

test("an error is recognised across copies of the package, by symbol", () => {
  const error = new KvError("KV_LIST_CLOSED", "list 3 is closed", { hint: "prepare it again" });
  expect(KvError.is(error)).toBe(true);
  expect(KvError.is(error, "KV_LIST_CLOSED")).toBe(true);
  expect(KvError.is(error, "KV_LIST_INVALID")).toBe(false);
  const foreign = Object.assign(new Error("x"), {
    [Symbol.for("@kv/KvError")]: true,
    code: "KV_LIST_CLOSED",
  });
  expect(KvError.is(foreign, "KV_LIST_CLOSED")).toBe(true);
  for (const other of [undefined, null, 1, "KV", new Error("KV_LIST_CLOSED")])
    expect(KvError.is(other)).toBe(false);
});

test("from returns a KvError unchanged and wraps other values as the cause", () => {
  const own = new KvError("KV_LIST_CLOSED", "x");
  expect(KvError.from(own, "KV_INTERNAL", "y")).toBe(own);
  const wrapped = KvError.from(new TypeError("bad"), "KV_INTERNAL", "while reading");
  expect(wrapped.message).toBe("while reading: bad");
  expect(wrapped.cause).toBeInstanceOf(TypeError);
});

test("toJSON is plain data with code and hint", () => {
  const error = new KvError("KV_PLAN_INVALID", "m", {
    hint: "h",
    details: { local: 1, remote: 2 },
  });
  expect(JSON.parse(JSON.stringify(error))).toEqual({
    name: "KvError",
    code: "KV_PLAN_INVALID",
    message: "m",
    hint: "h",
    details: { local: 1, remote: 2 },
  });
});

test("the first error comes only after all have ended", async () => {
  let hasEnded = false;
  const slow = new Promise<void>((resolve) => setTimeout(resolve, 20)).then(() => {
    hasEnded = true;
  });
  const failing = [Promise.reject(new Error("first")), Promise.reject(new Error("second")), slow];
  await expect(settleAll(failing)).rejects.toThrow("first");
  expect(hasEnded).toBe(true);
  await settleAll([undefined, slow]);
});
