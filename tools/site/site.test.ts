import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { KV_ERROR_CODES } from "@kv/interface";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { run } from "../release/tree.js";
import { anchorsOf, linked, type Page, readPages, root } from "./pages.js";

const { pages } = readPages();
const textOf = (source: string) => pages.find((page) => page.source === source)?.text ?? "";

test("every link of every page leads to a page, a heading or a file", () => {
  const dead: string[] = [];
  for (const page of pages) linked(page, pages, "https://example.org", dead);
  expect(dead).toEqual([]);
});

test("a link that leads nowhere is found, and others are rewritten for the site", () => {
  const page: Page = {
    source: "docs/a.md",
    target: "a.md",
    text: "# A\n[b](../packages/x/README.md#two-words) [c](#a) [d](#b) [e](gone.md) [f](../package.json)\n```\n[g](gone.md)\n```\n",
  };
  const other: Page = { source: "packages/x/README.md", target: "packages/x.md", text: "## Two words!\n" };
  const dead: string[] = [];
  expect(linked(page, [page, other], "https://example.org", dead)).toBe(
    "# A\n[b](./packages/x.md#two-words) [c](./a.md#a) [d](./a.md#b) [e](./gone.md) [f](https://example.org/blob/main/package.json)\n```\n[g](gone.md)\n```\n",
  );
  expect(dead).toEqual(["docs/a.md: #b", "docs/a.md: gone.md"]);
});

test("headings get the ids of the repository's web pages", () => {
  const text = "# Where did it go? `kv-peer trace`\n## A, b_c\n## A, b_c\n```\n# no heading\n```\n";
  expect([...anchorsOf(text)]).toEqual(["where-did-it-go-kv-peer-trace", "a-b_c", "a-b_c-1"]);
});

test("every code of the troubleshooting page is one of the closed list", () => {
  const codes = textOf("docs/troubleshooting.md").match(/KV_[A-Z_]+/g) ?? [];
  expect(codes.length).toBeGreaterThan(10);
  expect(codes.filter((code) => !(KV_ERROR_CODES as readonly string[]).includes(code))).toEqual([]);
});

describe("the site", () => {
  const out = mkdtempSync(join(tmpdir(), "kv-site-"));
  const read = (path: string) => readFileSync(join(out, path), "utf8");
  beforeAll(async () => {
    // In a process of its own: VitePress and TypeDoc change the one that they run in.
    await run(process.execPath, ["--import", "tsx", join(root, "tools/site/build.ts"), out], { cwd: root });
  }, 240_000);
  afterAll(() => rmSync(out, { recursive: true, force: true }));

  test("has every page, with its headings", () => {
    for (const { target, text } of pages) {
      const html = read(target.replace(/\.md$/, ".html"));
      for (const anchor of anchorsOf(text)) expect(html, target).toContain(`id="${anchor}"`);
    }
  });

  test("finds its pages by their words", () => {
    const index = JSON.parse(read("hashmap.json")) as Record<string, string>;
    expect(Object.keys(index)).toContain("troubleshooting.md");
    expect(read("index.html")).toContain("VPNavBarSearch");
  });

  test("leads each of the three readers to a beginning, and to the recipes", () => {
    const html = read("index.html");
    for (const page of ["run-vllm", "build-an-engine", "nixl-in-node"]) {
      expect(html).toContain(`/get-started/${page}.html`);
    }
    for (const page of ["pair-with-vllm", "replace-the-toy-proxy", "gate-an-upgrade", "efa", "air-gapped"]) {
      expect(html).toContain(`/recipes/${page}.html`);
    }
  });

  test("has a reference of the packages, and the planner", () => {
    const modules = read("reference/index.html");
    for (const name of ["@kv/interface", "@kv/plan/prove", "@kv/connector/building-blocks"]) {
      expect(modules).toContain(`${name}`);
    }
    const made = readdirSync(join(out, "reference/functions"));
    for (const name of ["buildEngineTransferPlan", "createPullScheduler", "nixlTransport", "createProxy"]) {
      expect(made.filter((file) => file.endsWith(`.${name}.html`))).toHaveLength(1);
    }
    expect(read("planner.html")).toContain("kv-plan");
  });
});
