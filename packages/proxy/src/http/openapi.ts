import { DECODE_ROUTES, ENDPOINTS, REFUSED_ROUTES, SIDECAR_ROUTES } from "@kv/fleet/front-end";
import COMPONENTS from "./openapi-components.json" with { type: "json" };

/** What this server answers, by path. */
export type Routes = ReadonlyMap<string, { readonly method: "GET" | "POST" }>;

/** The proxy's own routes. All others are vLLM's. */
const OWN: Readonly<Record<string, string>> = {
  "/health": "200 while an instance of each role is available and a pair fits, 503 otherwise",
  "/healthcheck": "The same as /health, as vLLM's toy proxy has it",
  "/status": "Instances, their load and health, and counts of requests",
  "/instances/add": "Adds an instance",
  "/instances/drain": "Sends an instance no further requests",
  "/instances/remove": "Drains an instance, and removes it when its requests have ended",
  "/openapi.json": "This description",
  "/docs": "This description as a page",
};

const ERROR = { $ref: "#/components/schemas/Error" };
const JSON_OBJECT = { "application/json": { schema: { type: "object" } } };

function summaryOf(path: string): string {
  const own = OWN[path];
  if (own !== undefined) return own;
  if (ENDPOINTS.some((endpoint) => endpoint === path))
    return "Generates text: P computes the prompt, D the answer. The body is vLLM's";
  if (DECODE_ROUTES.includes(path)) return "One decode instance answers, unchanged both ways";
  if (SIDECAR_ROUTES.includes(path)) return "The decode instance beside this sidecar answers";
  return "Models of the decode instances";
}

/**
 * An OpenAPI 3.1 document of the routes that are served. `x-refused` names the routes of vLLM that
 * are not, with the reason.
 */
export function openApi(routes: Routes, version: string): object {
  const paths = Array.from(routes, ([path, { method }]) => {
    const isModel = path.endsWith("/");
    const operation = {
      summary: summaryOf(path),
      tags: [path in OWN ? "kv-proxy" : "vLLM"],
      ...(isModel && {
        parameters: [{ name: "id", in: "path", required: true, schema: { type: "string" } }],
      }),
      ...(method === "POST" && { requestBody: { required: true, content: JSON_OBJECT } }),
      responses: {
        "200": { description: "the answer; with stream, server-sent events" },
        default: { description: "an error", content: { "application/json": { schema: ERROR } } },
      },
    };
    return [isModel ? `${path}{id}` : path, { [method.toLowerCase()]: operation }] as const;
  });
  return {
    openapi: "3.1.0",
    info: { title: "kv-proxy", version },
    paths: Object.fromEntries(paths),
    components: COMPONENTS,
    "x-refused": Object.fromEntries(REFUSED_ROUTES),
  };
}

/** The same as a page without scripts. */
export function docsPage(routes: Routes): string {
  const rows = Array.from(routes, ([path, { method }]) => [
    method,
    path.endsWith("/") ? `${path}{id}` : path,
    summaryOf(path),
  ]);
  const refused = Array.from(REFUSED_ROUTES, ([route, why]) => [...route.split(" "), why]);
  const table = (title: string, all: readonly (readonly string[])[]) =>
    `<h2>${title}</h2><table>${all
      .map(
        ([method, path, text]) =>
          `<tr><td>${method}<td><code>${escaped(path)}</code><td>${escaped(text)}`,
      )
      .join("\n")}</table>`;
  return `<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kv-proxy: routes</title>
<style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 64rem; padding: 0 1rem; }
td { padding: 0.2rem 1rem 0.2rem 0; vertical-align: top; overflow-wrap: anywhere; }
</style>
<h1>kv-proxy</h1>
<p>As <a href="/openapi.json">OpenAPI 3.1</a>. Bodies of vLLM's routes are vLLM's.</p>
${table("Routes", rows)}
${table("Routes of vLLM that are refused", refused)}
</html>
`;
}

const escaped = (text = ""): string => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
