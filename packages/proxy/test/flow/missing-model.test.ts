import { type Answer, decodeOk, prefillOk, type Seen } from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { isRelease } from "../support/releases.js";
import { post, runFleet, sends } from "../support/set-up.js";

const NO_MODEL = {
  error: { message: "no model", type: "NotFoundError", param: "model", code: 404 },
};

/** An instance that has the LoRA adapter `lora`, or not. */
const having =
  (answer: Answer) =>
  (has: boolean): Answer =>
  (seen) =>
    (has || seen.json["model"] === "base" ? answer : sends(404, NO_MODEL))(seen);

async function start(
  mode: "pull" | "push",
  prefillers: readonly boolean[],
  decoders: readonly boolean[],
) {
  const { p, d, url } = await runFleet(
    prefillers.map(having(prefillOk)),
    decoders.map(having(decodeOk)),
    { mode, routing: { prefill: "round-robin", decode: "round-robin" } },
  );
  const ask = async (model: string, path = "/v1/completions", body = {}) =>
    (await post(`${url}${path}`, { model, prompt: "a", ...body })).status;
  return { p, d, ask };
}

/** How often each was asked for a model, without the requests that free blocks. */
const asked = (of: readonly { readonly seen: readonly Seen[] }[], model: string) =>
  of.map(({ seen }) => seen.filter((one) => one.json["model"] === model && !isRelease(one)).length);

test.each(["pull", "push"] as const)(
  "field.md R13: %s: a LoRA adapter that only some instances have is served by these, and the others are asked once",
  async (mode) => {
    const { p, d, ask } = await start(mode, [false, true], [true, false, false]);
    for (let times = 0; times < 6; times += 1) expect(await ask("lora")).toBe(200);
    // Requests of several parts know it too.
    expect(await ask("lora", "/v1/completions", { n: 3 })).toBe(200);
    expect(await ask("lora", "/tokenize")).toBe(200);
    if (mode === "pull") expect(asked(p, "lora")[0]).toBe(1);
    const [, second = 0, third = 0] = asked(d, "lora");
    expect(second + third).toBeLessThan(5);
    for (let times = 0; times < 6; times += 1) expect(await ask("base")).toBe(200);
    expect(asked(d, "base")).toEqual([2, 2, 2]);
  },
);

test("a model that no instance has is the client's error, and no instance's failure", async () => {
  const { p, d, ask } = await start("pull", [true], [false, false]);
  for (let times = 0; times < 3; times += 1) expect(await ask("lora")).toBe(404);
  expect([asked(p, "lora"), asked(d, "lora")]).toEqual([[3], [3, 3]]);
  expect(await ask("lora", "/tokenize")).toBe(404);
  expect(await ask("base")).toBe(200);
});
