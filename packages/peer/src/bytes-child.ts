import { KvError, systemClock } from "@kv/interface";
import { nixlTransport } from "@kv/nixl";
import { type BytesQuestion, probeBytes } from "./doctor/bytes-probe.js";

// A process of its own: it may crash in NIXL, hang in UCX, and write what it likes to its output. Asked and answered over IPC.
async function answer(question: BytesQuestion): Promise<object> {
  const transport = nixlTransport();
  try {
    return { answer: await probeBytes(transport, question, systemClock()) };
  } catch (thrown) {
    return { error: KvError.from(thrown, "KV_INTERNAL", "the probe failed").toJSON() };
  } finally {
    await transport.close();
  }
}

process.once("message", (question) => {
  void answer(question as BytesQuestion).then((message) => {
    process.send?.(message);
    process.disconnect();
  });
});
