import type { IncomingMessage } from "node:http";
import { Readable } from "node:stream";
import { expect, it } from "vitest";
import { httpLimits } from "./limits.js";
import { BodyReader } from "./read-body.js";

it("keeps no chunk of a body: each may hold the memory of a whole read", async () => {
  const chunks = [...'{"prompt":"a b c"}'].map((character) => Buffer.from(character));
  const request = Object.assign(Readable.from(chunks, { objectMode: false }), { headers: {}, socket: {} });
  const body = new BodyReader(httpLimits()).read(request as unknown as IncomingMessage);
  // Before the reader takes the whole.
  request.prependListener("end", () => {
    for (const chunk of chunks) chunk.fill("x");
  });
  expect(await body).toEqual({ prompt: "a b c" });
});
