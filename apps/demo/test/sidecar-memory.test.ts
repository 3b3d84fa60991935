import { createProxy } from "@kv/proxy";
import { afterAll, beforeAll, describe, expect, it } from "vitest";
import type { Cluster } from "../src/cluster/cluster.js";
import { fetchRecords } from "../src/run/check-run.js";
import { preparedRun, startPair } from "./support/matrix.js";

// The header's rules are in packages/proxy/test/flow/sidecar.test.ts.

interface Answer {
  readonly choices: readonly {
    readonly index: number;
    readonly token_ids: readonly number[] | null;
  }[];
}

const CONNECTORS = [
  ["NixlConnector", "pull"],
  ["NixlPushConnector", "push"],
] as const;

describe.each(CONNECTORS)("a sidecar beside a decode instance, %s", (connector, mode) => {
  let cluster: Cluster;
  let sidecar: ReturnType<typeof createProxy>;
  let url = "";
  let prompts: readonly (readonly number[])[] = [];
  let [prefillUrl, decodeUrl] = ["", ""];
  let serial = 0;

  beforeAll(async () => {
    ({ prompts } = await preparedRun());
    cluster = await startPair({ connector, leaseSeconds: 5 });
    [prefillUrl = "", decodeUrl = ""] = [...cluster.prefills, ...cluster.decodes].map(
      (member) => member.url,
    );
    sidecar = createProxy({
      mode,
      decoders: [decodeUrl],
      sidecar: { allow: ["127.0.0.1"] },
      // The side channels of the memory network are in this process.
      pairing: { mode: "off" },
    });
    ({ url } = await sidecar.listen({ port: 0 }));
  });
  afterAll(async () => {
    await sidecar.close();
    await cluster.close();
  });

  const post = (to: string, body: object, id = "alone") =>
    fetch(`${to}/v1/completions`, {
      method: "POST",
      headers: {
        "content-type": "application/json",
        "x-request-id": id,
        "x-prefiller-host-port": new URL(prefillUrl).host,
      },
      body: JSON.stringify({ temperature: 0, ignore_eos: true, return_token_ids: true, ...body }),
    });
  /** A prompt that no instance has cached, as its first token is new. */
  const fresh = (at: number) => {
    serial += 1;
    return [100 + serial, ...(prompts[at] ?? [])];
  };
  /** The tokens of each choice. */
  const tokens = async (answer: Response) =>
    ((await answer.json()) as Answer).choices.map(({ token_ids }) => token_ids);
  const alone = async (prompt: readonly number[], body: object) =>
    (await tokens(await post(decodeUrl, { ...body, prompt })))[0];

  it.each([
    ["one prompt", [0], {}],
    ["one token", [1], { max_tokens: 1 }],
    ["a stop token", [2], { ignore_eos: false }],
    ["several prompts", [3, 4, 5], {}],
  ])(
    "%s: the tokens are those of the decode instance alone, with KV from the prefill instance",
    async (name, at, more) => {
      const body = { max_tokens: 8, ...more };
      const asked = at.map(fresh);
      const id = `case-${name.replaceAll(" ", "-")}`;
      const prompt = asked.length === 1 ? asked[0] : asked;
      const got = await tokens(await post(url, { ...body, prompt }, id));
      // The side that moves the bytes records them, P of a push shortly after D goes on.
      const moved = async () =>
        (await fetchRecords(mode === "pull" ? decodeUrl : prefillUrl)).flatMap(
          ({ request_id, transfer }) =>
            request_id.startsWith(`cmpl-${id}`) ? [(transfer?.length_bytes ?? 0) > 0] : [],
        );
      await expect.poll(moved).toEqual(asked.map(() => true));
      expect(got).toEqual(await Promise.all(asked.map((prompt) => alone(prompt, body))));
    },
  );

  it("copies of a prompt, streamed: each is what the decode instance alone generates", async () => {
    const prompt = fresh(7);
    const answer = await post(url, { prompt, max_tokens: 4, n: 3, stream: true }, "copies");
    const byIndex = new Map<number, number[]>();
    for (const [, data = ""] of (await answer.text()).matchAll(/^data: (\{.*)$/gm))
      for (const { index, token_ids } of (JSON.parse(data) as Answer).choices)
        byIndex.set(index, [...(byIndex.get(index) ?? []), ...(token_ids ?? [])]);
    const right = await alone(prompt, { max_tokens: 4 });
    expect([0, 1, 2].map((index) => byIndex.get(index))).toEqual([right, right, right]);
  });
});
