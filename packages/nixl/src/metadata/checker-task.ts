import { answerOf, sendToOwner } from "@kv/program";
import { nixlTransport } from "../transport.js";
import type { CheckRequest } from "./checker-process.js";

/** The task `check-metadata` of a child process: loads the metadata it is sent, one after the other. Damaged metadata may crash it. */
export async function checkMetadataTask([backends = ""]: readonly string[]): Promise<never> {
  const transport = nixlTransport({ backends: backends.split(",") });
  const agent = await transport.createAgent();
  const load = async (metadata: string) =>
    agent.removeRemote(await agent.addRemote(Buffer.from(metadata, "base64")));
  let last = Promise.resolve();
  process.on("message", ({ metadata }: CheckRequest) => {
    last = last.then(async () => sendToOwner(await answerOf(() => load(metadata))));
  });
  await sendToOwner({ value: "ready" });
  return new Promise(() => {});
}
