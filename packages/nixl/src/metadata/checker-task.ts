import { KvError } from "@kv/interface";
import { nixlTransport } from "../transport.js";
import type { CheckAnswer, CheckRequest } from "./checker-messages.js";

/** The task of a child process: has NIXL load whatever it is sent, one after the other, and survives it or not. */
export async function metadataChecker([backends = ""]: readonly string[]): Promise<never> {
  const transport = nixlTransport({ backends: backends.split(",") });
  const agent = await transport.createAgent();
  const tell = (answer: CheckAnswer) => process.send?.(answer);
  let last = Promise.resolve();
  process.on("message", ({ metadata }: CheckRequest) => {
    last = last
      .then(async () => agent.removeRemote(await agent.addRemote(Buffer.from(metadata, "base64"))))
      .then(
        () => tell({}),
        (error: unknown) => {
          const { code, message } = KvError.from(error, "KV_AGENT_METADATA_INVALID", "NIXL refuses it");
          tell({ error: { code, message } });
        },
      )
      .then(() => {});
  });
  tell({ ready: true });
  return new Promise(() => {});
}
