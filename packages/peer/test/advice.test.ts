import { zmqSideChannel } from "@kv/side-channel";
import Fastify from "fastify";
import { expect, test } from "vitest";
import { pairDoctor } from "../src/doctor/pair-doctor.js";
import { readTarget } from "../src/doctor/target.js";
import { REPLY } from "./sample-recording.js";

/** `/metrics` of a vLLM server whose 100 requests waited up to 20 s in the queue. */
const METRICS = ["1.0", "20.0", "40.0", "+Inf"]
  .flatMap((le, at) =>
    ["0", "1"].map(
      (engine) =>
        `vllm:request_queue_time_seconds_bucket{engine="${engine}",le="${le}"} ${at === 0 ? 20 : 50}`,
    ),
  )
  .concat(
    'vllm:request_queue_time_seconds_count{engine="0"} 50',
    'vllm:request_queue_time_seconds_count{engine="1"} 50',
  )
  .join("\n");

test("the queue times of decode are compared with the lease", async () => {
  const sideChannel = zmqSideChannel();
  const listener = await sideChannel.listen({ host: "127.0.0.1", port: 0, answer: () => REPLY });
  const address = { host: "127.0.0.1", port: listener.port };
  const app = Fastify();
  app.get("/health", () => ({}));
  app.get("/metrics", () => METRICS);
  const url = await app.listen({ host: "127.0.0.1", port: 0 });
  const leaseOf = async (leaseMs?: number) => {
    const { checks } = await pairDoctor({
      prefill: readTarget(`127.0.0.1:${listener.port}`),
      decode: readTarget(url),
      sideChannels: { decode: address },
      sideChannel,
      ask: false,
      leaseMs,
    });
    return checks.find(({ id }) => id === "decode.lease");
  };
  try {
    expect(await leaseOf()).toMatchObject({
      status: "warn",
      found: expect.stringContaining(
        "99 % of 100 requests waited at most 20 s in the queue; a lease lasts 30 s",
      ),
      fix: expect.stringContaining("to at least 40"),
    });
    // Twice the queue time is enough.
    expect((await leaseOf(40_000))?.status).toBe("ok");
  } finally {
    await app.close();
    await listener.close();
    await sideChannel.close();
  }
});
