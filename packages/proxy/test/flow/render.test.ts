import type { Routing, RoutingContext } from "@kv/fleet";
import { type Answer, decodeOk, prefillOk } from "@kv/testing/http/fake-upstream";
import { recordedLog } from "@kv/testing/recorded-log";
import { expect, test } from "vitest";
import { breaks, post, runFleet, sends, upstream } from "../support/set-up.js";

const CHAT = "/v1/chat/completions";

/** A prefill instance that renders prompts with `render`, or does its part. */
async function rendering(render: Answer) {
  const started = await upstream((seen) =>
    seen.path.endsWith("/render") ? render(seen) : prefillOk(seen),
  );
  const rendered = () => started.seen.filter(({ path }) => path.endsWith("/render"));
  return { url: started.url, rendered };
}

async function proxied(prefill: string, options: { forwardHeaders?: string[] } = {}) {
  const seen: RoutingContext[] = [];
  const { log, logged } = recordedLog();
  const routing: Routing = {
    name: "test",
    choose: ([first], context) => {
      seen.push(context);
      return first;
    },
    readsTokenIds: () => true,
  };
  const running = await runFleet([], [decodeOk], {
    prefillers: [prefill],
    createRouting: () => routing,
    log,
    ...options,
  });
  return {
    ...running,
    logged,
    tokenIds: () => seen.map(({ request }) => request?.tokenIds && Array.from(request.tokenIds)),
  };
}

test("both legs are routed by the token ids that an instance has rendered, once for one prompt", async () => {
  const p = await rendering(sends(200, { token_ids: [1, 2, 3] }));
  const { url, tokenIds } = await proxied(p.url, { forwardHeaders: ["authorization"] });
  const messages = [{ role: "user", content: "hello" }];
  const body = { model: "m", messages, temperature: 0.1 };
  const headers = { authorization: "Bearer key" };
  const answers = await Promise.all([
    post(`${url}${CHAT}`, body, { headers }),
    post(`${url}${CHAT}`, { ...body, temperature: 0.9, max_tokens: 7 }, { headers }),
  ]);
  expect(answers.map(({ status }) => status)).toEqual([200, 200]);
  await post(`${url}${CHAT}`, { ...body, stream: true });
  expect(tokenIds()).toEqual(Array(6).fill([1, 2, 3]));
  expect(p.rendered().map(({ path, json }) => [path, json.messages])).toEqual([
    [`${CHAT}/render`, messages],
  ]);
  expect(p.rendered()[0]?.headers.authorization).toBe("Bearer key");
  await post(`${url}${CHAT}`, { ...body, tools: [] });
  await post(`${url}/v1/messages`, body);
  expect(p.rendered().map(({ path }) => path)).toEqual([
    `${CHAT}/render`,
    `${CHAT}/render`,
    "/v1/messages/render",
  ]);
});

test("a completion's text is rendered, several copies once; a prompt of token ids and a list of prompts are not", async () => {
  const p = await rendering(sends(200, [{ token_ids: [4, 5] }]));
  const { ask, tokenIds } = await proxied(p.url);
  await ask({ prompt: "text", n: 2 });
  // The second copy goes where the first one was computed, without a choice.
  expect(tokenIds()).toEqual(Array(3).fill([4, 5]));
  for (const prompt of [
    [1, 2],
    ["a", "b"],
  ])
    await ask({ prompt });
  expect(p.rendered()).toHaveLength(1);
});

test.each<[string, Answer, RegExp]>([
  ["lacks the route", sends(404), /404 .*since 0.32/],
  ["does not serve the route", sends(403), /403 .*--enable-scale-out/],
  ["fails", sends(500), /500/],
  ["answers without token ids", sends(200, { token_ids: "1" }), /without token ids/],
  ["answers wrong ids", sends(200, { token_ids: [1.5] }), /without token ids/],
  ["closes the connection", breaks, /closed the connection/],
])(
  "where the instance %s, requests go on without token ids, and it is logged once",
  async (_, render, why) => {
    const p = await rendering(render);
    const { url, tokenIds, logged } = await proxied(p.url);
    for (const content of ["a", "b", "c"]) {
      const answer = await post(`${url}${CHAT}`, { messages: [{ role: "user", content }] });
      expect(answer.status).toBe(200);
    }
    expect(tokenIds()).toEqual(Array(6).fill(undefined));
    expect(logged("prompt-not-rendered")).toEqual([
      expect.objectContaining({ instance: p.url, reason: expect.stringMatching(why) }),
    ]);
  },
);
