import { COMPLETION, prefillOk, type Seen, sendJson } from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { post, runProxy, upstream } from "../support/set-up.js";

const NO_MODEL = {
  error: { message: "no model", type: "NotFoundError", param: "model", code: 404 },
};

/** An instance that has the LoRA adapter `lora`, or not. */
const instance = (has: boolean, answer: (seen: Seen) => void | Promise<void>) =>
  upstream((seen) =>
    has || seen.json["model"] === "base" ? answer(seen) : sendJson(seen.response, NO_MODEL, 404),
  );
const decode = ({ response }: Seen) => sendJson(response, COMPLETION);

async function start(
  mode: "pull" | "push",
  prefillers: readonly boolean[],
  decoders: readonly boolean[],
) {
  const p = await Promise.all(prefillers.map((has) => instance(has, prefillOk)));
  const d = await Promise.all(decoders.map((has) => instance(has, decode)));
  const { url } = await runProxy({
    mode,
    prefillers: p.map((one, at) => ({ url: one.url, kv: { engineId: `p${at}` } })),
    decoders: d.map((one) => one.url),
    routing: { prefill: "round-robin", decode: "round-robin" },
  });
  const ask = async (model: string, path = "/v1/completions", body = {}) =>
    (await post(`${url}${path}`, { model, prompt: "a", ...body })).status;
  return { p, d, ask };
}

/** How often each was asked for a model, without the requests that free blocks. */
const asked = (of: readonly { readonly seen: readonly Seen[] }[], model: string) =>
  of.map(
    ({ seen }) =>
      seen.filter(({ json, headers }) => json["model"] === model && !isRelease(headers)).length,
  );
const isRelease = (headers: Seen["headers"]) =>
  String(headers["x-request-id"]).endsWith("-release");

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
