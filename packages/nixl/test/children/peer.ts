// A process with an agent and registered memory, controlled by messages: the other side of
// two-process tests.
import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { nixlTransport } from "@kv/nixl";
import { fillPattern } from "../support/pattern.js";

const { lengthBytes, seed, env, backends } = JSON.parse(process.argv[2] ?? "{}") as {
  lengthBytes: number;
  seed: number;
  env: Record<string, string>;
  backends: string[];
};
const transport = nixlTransport({ env, backends });
const agent = await transport.createAgent();
const memory = transport.allocate(lengthBytes);
fillPattern(memory.bytes, seed);
const registration = await agent.register(memory);
const notifications = agent.notifications();

interface Message {
  lengthBytes?: number;
}
const answers: Record<string, (message: Message) => Promise<unknown>> = {
  hash: async ({ lengthBytes: hashed = lengthBytes }) =>
    createHash("sha256").update(memory.bytes.subarray(0, hashed)).digest("hex"),
  next: async () => {
    const { value } = (await notifications.next()) as {
      value: { from: string; payload: Uint8Array };
    };
    return { from: value.from, payload: Buffer.from(value.payload).toString("base64") };
  },
  spawn: async () => spawn("sleep", ["600"], { stdio: "ignore", detached: true }).pid,
  close: async () => {
    await registration.close();
    memory.close();
    await transport.close();
    return "closed";
  },
};

process.on("message", (message: Message & { do: string }) => {
  void answers[message.do]?.(message).then((answer) => {
    process.send?.({ answer: answer ?? null });
    if (message.do === "close") process.disconnect();
  });
});
process.send?.({
  answer: {
    name: agent.name,
    address: memory.address,
    metadata: Buffer.from(await agent.localMetadata()).toString("base64"),
  },
});
