import { KvError } from "@kv/interface";
import { nixlTransport } from "../transport.js";
import type { CheckAnswer, CheckRequest } from "./checker-process.js";

/** The task `check-metadata` of a child process: loads the metadata it is sent, one after the other. Damaged metadata may crash it. */
export async function checkMetadataTask([backends = ""]: readonly string[]): Promise<never> {
  const transport = nixlTransport({ backends: backends.split(",") });
  const agent = await transport.createAgent();
  const send = (answer: CheckAnswer) => process.send?.(answer);
  let last = Promise.resolve();
  process.on("message", ({ metadata }: CheckRequest) => {
    last = last
      .then(async () => agent.removeRemote(await agent.addRemote(Buffer.from(metadata, "base64"))))
      .then(
        () => send({}),
        (error: unknown) => {
          const { code, message } = KvError.from(error, "KV_AGENT_METADATA_INVALID", "NIXL refuses it");
          send({ error: { code, message } });
        },
      )
      .then(() => {});
  });
  send({ ready: true });
  return new Promise(() => {});
}
