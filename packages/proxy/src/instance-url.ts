import { KvError } from "@kv/interface";

/**
 * The base URL of an instance, without a slash at its end: `host:port` means plain HTTP, and a `/v1` at the end, as in an
 * OpenAI client's base URL, is dropped. Errors: `KV_CONFIG_INVALID`.
 */
export function instanceUrl(given: string): string {
  const text = given.trim();
  const url = parse(/^[a-z][a-z0-9+.-]*:\/\//i.test(text) ? text : `http://${text}`, given);
  if (url.protocol !== "http:" && url.protocol !== "https:")
    throw invalid(given, `${url.protocol} is not HTTP`);
  if (url.username !== "" || url.password !== "") throw invalid(given, "it holds a user name or a password");
  if (url.search !== "" || url.hash !== "") throw invalid(given, "it holds a query or a fragment");
  const path = url.pathname.replace(/\/+$/, "").replace(/\/v1$/, "");
  return `${url.origin}${path}`;
}

function parse(text: string, given: string): URL {
  try {
    return new URL(text);
  } catch (cause) {
    throw invalid(given, "it cannot be read as a URL", cause);
  }
}

function invalid(given: string, why: string, cause?: unknown): KvError {
  return new KvError("KV_CONFIG_INVALID", `"${given}" is not the URL of an instance: ${why}`, {
    hint: "give host:port or http://host:port",
    cause,
  });
}
