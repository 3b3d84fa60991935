import { Agent, request as httpRequest } from "node:http";

export const SMALL = JSON.stringify({
  model: "m",
  prompt: "a few words",
  max_tokens: 4,
  stream: true,
});

const agent = new Agent({ keepAlive: true });

/**
 * Gets `/health`, or posts a completion. Resolves at the end of the answer, and rejects where its
 * status is not 200.
 */
export function send(url: string, body?: string | Uint8Array, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const path = body === undefined ? "/health" : "/v1/completions";
    const options = { agent, method: body === undefined ? "GET" : "POST", signal };
    const headers = { "content-type": "application/json" };
    const sent = httpRequest(url + path, { ...options, headers }, (answer) => {
      if (answer.statusCode !== 200) reject(new Error(`status ${answer.statusCode}`));
      answer.resume().once("end", resolve).once("error", reject);
    });
    sent.once("error", reject).end(body);
  });
}
