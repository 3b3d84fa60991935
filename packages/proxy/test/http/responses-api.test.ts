import { KV_PARAMS_TEXT } from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { errorOf, post, runPair, sends } from "../support/set-up.js";

const output = [{ type: "message", content: [{ type: "output_text", text: "hello" }] }];

const pair = () =>
  runPair({
    p: ({ response }) =>
      void response.end(
        `{"id":"resp_1","output":[],"status":"incomplete","kv_transfer_params":${KV_PARAMS_TEXT}}`,
      ),
    d: sends(200, { id: "resp_1", output, status: "completed" }),
  });

test("/v1/responses: the prefill leg has one token of max_output_tokens, the decode leg the parameters", async () => {
  const { p, d, url } = await pair();
  const tools = [{ type: "function", name: "f", parameters: {} }];
  const body = { model: "m", input: "hi", instructions: "be short", tools, max_output_tokens: 50 };
  const response = await post(`${url}/v1/responses`, body);
  expect(await response.json()).toMatchObject({ output, status: "completed" });
  expect(p.seen[0]?.json).toMatchObject({ ...body, max_output_tokens: 1, stream: false });
  expect(p.seen[0]?.json).not.toHaveProperty("max_tokens");
  expect(d.seen[0]?.json).toMatchObject({
    ...body,
    kv_transfer_params: { do_remote_prefill: true },
  });
});

test("refuses requests that need one server's memory, with the reason", async () => {
  const { p, url } = await pair();
  const refused = await errorOf(
    await post(`${url}/v1/responses`, { input: "hi", previous_response_id: "resp_0" }),
  );
  expect(refused).toMatchObject({ status: 400, code: "KV_REQUEST_INVALID" });
  expect(refused.message).toContain("previous_response_id");
  expect(p.seen).toHaveLength(0);
});
