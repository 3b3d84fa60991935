import { expect, test } from "vitest";
import { words } from "./boundary-cases.js";
import { ONE_USE, plain } from "./completion.js";
import type { ProxyPair } from "./proxy-pair.js";

const PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"];
const REQUEST = {
  model: "tiny",
  prompt: words(40, 40),
  input: words(40, 40),
  max_tokens: 4,
  messages: [{ role: "user", content: words(40, 40) }],
};

/**
 * Members that reach a connector or an encoder of vLLM 0.33. Those of the first line end
 * EngineCore, or make it answer 500.
 */
const WAYS = [
  ...['""', '"x"', "0", "[]"].map((value) => `"vllm_xargs":{"kv_transfer_params":${value}}`),
  '"vllm_xargs":{"\\u006bv_transfer_params":0}',
  '"vllm_xargs":{"kv_transfer_params":0},"vllm_xargs":{}',
  '"vllm_xargs":{"ec_transfer_params":"x"}',
  '"kv_transfer_params":{"do_remote_prefill":true},"kv_transfer_params":null',
  '"ec_transfer_params":{"a":1}',
  '"kv_hints":{}',
];
/** Members that choose a way through the front: two legs, P alone, D alone. */
const FLOWS = [
  {},
  { n: 2, temperature: 0.9 },
  { echo: true, max_tokens: 0 },
  { use_beam_search: true },
];

/**
 * Each way to a connector is refused by the front at `open`, in each flow, and both engines serve
 * afterwards.
 */
export function connectorMembersSuite(
  pair: ProxyPair,
  name: string,
  open: () => Promise<{ readonly url: string }>,
): void {
  test(`${name}: what reaches vLLM's connector is refused with 400, and the engines of P and D live`, async () => {
    const { url } = await open();
    for (const path of PATHS)
      for (const way of WAYS)
        for (const flow of path === "/v1/completions" ? FLOWS : [{}]) {
          const body = `${JSON.stringify({ ...REQUEST, ...flow }).slice(0, -1)},${way}}`;
          const headers = { "content-type": "application/json", ...ONE_USE };
          const answer = await fetch(url + path, { method: "POST", headers, body });
          const text = await answer.text();
          expect([answer.status, text], body).toEqual([
            400,
            expect.stringMatching(/xargs|transfer_params|kv_hints/),
          ]);
        }
    for (const server of [pair.p, pair.d]) await plain(server.url, [20, 30], 2);
    await pair.freed();
  });
}
