import { setImmediate as turn } from "node:timers/promises";

import { rawClient } from "@kv/testing/http/raw-client";
import { expect, test, vi } from "vitest";
import { runPair } from "../support/set-up.js";
import { ALL, cutAt, everyByte, randomCuts, UNCUT } from "./cuts.js";

const LIMITS = { bodyLengthBytes: 150, bodyDepth: 3, bodyMembers: 30, bodyValues: 20 };

/** Posts a body, each piece of it in a read of its own. */
async function postPieces(url: string, pieces: readonly Buffer[]): Promise<string> {
  const head =
    "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-request-id: r\r\n";
  const { socket, received } = await rawClient(url, `${head}transfer-encoding: chunked\r\n\r\n`);
  for (const piece of pieces) {
    // What is written in a turn is read in the next one.
    for (let turns = 0; turns < 3; turns += 1) await turn();
    if (piece.length > 0)
      socket.write(`${piece.length.toString(16)}\r\n${piece.toString("latin1")}\r\n`, "latin1");
  }
  socket.write("0\r\n\r\n");
  const isWhole = () => /\r\n\r\n[\s\S]*\}$/.test(received());
  await vi.waitUntil(isWhole, { interval: 1, timeout: 10_000 });
  socket.destroy();
  return received().replace(/\r\ndate: [^\r]*/gi, "");
}

test.each([
  ["a request", 200, '{"prompt":"é🎈 \\"[","seed":12345678901234567890,"x":[1,2]}'],
  ["no JSON", 400, '{"prompt":"a"'],
  ["more than one limit, the depth first", 400, `{"prompt":[[[["${"a".repeat(200)}"]]]]}`],
  [
    "more than one limit, the values first",
    400,
    `{"prompt":[${"1,".repeat(30)}[[[[2]]]]],"x":"${"a".repeat(200)}"}`,
  ],
  ["more than one limit, the length first", 413, `{"prompt":"${"a".repeat(200)}","x":[[[[]]]]}`],
])("%s is answered %i wherever its body is cut", async (_what, status, text) => {
  const { p, d, url } = await runPair({}, { limits: LIMITS });
  const bytes = Buffer.from(text);
  const whole = await postPieces(url, UNCUT(bytes));
  expect(whole).toContain(`HTTP/1.1 ${status} `);
  const legs = [p, d].map(({ seen }) => seen[0]?.body);
  for (const at of (ALL ? everyByte : randomCuts(15, 1, text))(bytes.length)) {
    for (const { seen } of [p, d]) (seen as unknown[]).length = 0;
    expect([at, await postPieces(url, cutAt(at)(bytes))]).toEqual([at, whole]);
    expect([p, d].map(({ seen }) => seen[0]?.body)).toEqual(legs);
  }
});
