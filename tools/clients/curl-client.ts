import { execFile } from "node:child_process";
import { promisify } from "node:util";
import { comparable } from "../vllm/boundary-cases.js";
import { ASKED, type Cases } from "./requests.js";

const run = promisify(execFile);
const { model, prompt } = ASKED;
const completion = { model, prompt, temperature: 0, max_tokens: 8 };
const message = {
  model,
  messages: [{ role: "user", content: prompt }],
  max_tokens: 8,
  temperature: 0,
};

/** curl, with the flags of READMEs and scripts. */
export function curlCases(url: string): Cases {
  const get = async (path: string, ...flags: readonly string[]) => {
    const end = "\n%{http_code} %{content_type}";
    const { stdout } = await run("curl", ["-sS", "-w", end, ...flags, url + path]);
    const at = stdout.lastIndexOf("\n");
    const [status = "", type = ""] = stdout.slice(at + 1).split(" ");
    const init = { status: Number(status), headers: { "content-type": type } };
    return (await comparable(new Response(stdout.slice(0, at), init))) as {
      readonly status: number;
    };
  };
  const json = ["-H", "Content-Type: application/json"];
  const post = (path: string, body: object, ...flags: readonly string[]) =>
    get(path, ...json, "-d", JSON.stringify(body), ...flags);
  return {
    "a completion": () => post("/v1/completions", completion),
    "a completion, streamed": () => post("/v1/completions", { ...completion, stream: true }, "-N"),
    "compressed, if the server wants": () => post("/v1/completions", completion, "--compressed"),
    "HTTP/1.0": () => post("/v1/completions", completion, "--http1.0"),
    "a body in chunks": () =>
      post("/v1/completions", completion, "-H", "Transfer-Encoding: chunked"),
    "a body that waits for 100": () =>
      post("/v1/completions", completion, "-H", "Expect: 100-continue"),
    "a message, streamed": () => post("/v1/messages", { ...message, stream: true }, "-N"),
  };
}
