// A long suite: builds the documentation site and follows its links.

import { existsSync, readdirSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { extname, join } from "node:path";
import { pathToFileURL } from "node:url";
import { someOf } from "@kv/testing/long-run";
import { scratchFolder } from "@kv/testing/scratch-folder";
import { beforeAll, describe, expect, test } from "vitest";
import { chromium, openBrowser } from "../../packages/kv-plan/test/chromium.js";
import { run } from "../release/tree.js";
import { root } from "../repository/source-files.js";
import { anchorsOf, readPages } from "./pages.js";

const { pages } = readPages();
const TYPES: Readonly<Record<string, string>> = {
  ".html": "text/html",
  ".js": "text/javascript",
  ".css": "text/css",
  ".svg": "image/svg+xml",
};
/** Whether all Mermaid diagrams of a page are drawn. */
const DRAWN = `[...document.querySelectorAll("pre.mermaid")].every((one) => one.querySelector("svg") !== null)`;
/**
 * The width of a page, its diagrams without those that Mermaid refused, and pictures whose smallest
 * text, 12 px in each, is below 8 px.
 */
const WIDTHS = `({
  wide: document.documentElement.scrollWidth,
  drawn: document.querySelectorAll("pre.mermaid svg:not(:has(.error-icon))").length,
  small: [...document.querySelectorAll(".vp-doc img")].filter((one) => (12 * one.clientWidth) / one.naturalWidth < 8).map((one) => one.currentSrc.slice(0, 80)),
})`;
// What the site searches with, of the version that it is built with.
const MiniSearch = createRequire(createRequire(import.meta.url).resolve("vitepress"))(
  "minisearch",
) as {
  loadJSON(
    index: string,
    options: object,
  ): { search(text: string, options: object): { id: string }[] };
};

describe("the site", () => {
  const out = scratchFolder();
  const read = (path: string) => readFileSync(join(out, path), "utf8");
  beforeAll(async () => {
    // In a process of its own: VitePress and TypeDoc change the one that they run in.
    await run(process.execPath, ["--import", "tsx", join(root, "tools/site/build.ts"), out], {
      cwd: root,
    });
  }, 600_000);

  test("has every page, with its headings", () => {
    for (const { target, text } of pages) {
      const html = read(target.replace(/\.md$/, ".html"));
      for (const anchor of anchorsOf(text)) expect(html, target).toContain(`id="${anchor}"`);
    }
  });

  test("first-contact.md 9: each kind of page has an icon; the home page shows the version and a command", () => {
    for (const page of ["index.html", "errors.html", "planner.html", "reference/index.html"])
      expect(read(page), page).toMatch(/<link [^>]*rel="icon"/);
    const file = join(root, "packages/kv-plan/package.json");
    const { version } = JSON.parse(readFileSync(file, "utf8")) as { version: string };
    const home = read("index.html");
    expect(home).toMatch(new RegExp(`<span[^>]*>${version}</span>`));
    expect(home).toMatch(/<div class="language-sh/);
  });

  test("finds its pages by their words", () => {
    const index = JSON.parse(read("hashmap.json")) as Record<string, string>;
    expect(Object.keys(index)).toContain("troubleshooting.md");
    expect(read("index.html")).toContain("VPNavBarSearch");
  });

  test.each(["52234", "vllm#52234", "2996", "llm-d-router#1737"])(
    "finds the report %s by its number",
    async (number) => {
      const chunks = join(out, "assets/chunks");
      const [file = ""] = readdirSync(chunks).filter((name) =>
        name.startsWith("@localSearchIndexroot"),
      );
      const index = (await import(pathToFileURL(join(chunks, file)).href)) as { default: string };
      const options = { fields: ["title", "titles", "text"], storeFields: ["title", "titles"] };
      const found = MiniSearch.loadJSON(index.default, options).search(number, {
        combineWith: "AND",
      });
      expect(found.map(({ id }) => id)).toContainEqual(
        expect.stringMatching(/\/field-reports\.html#/),
      );
    },
  );

  test("leads each of the three readers to a beginning, and to the recipes", () => {
    const html = read("index.html");
    for (const page of ["run-vllm", "build-an-engine", "nixl-in-node"]) {
      expect(html).toContain(`/get-started/${page}.html`);
    }
    for (const page of [
      "pair-with-vllm",
      "replace-the-toy-proxy",
      "gate-an-upgrade",
      "efa",
      "air-gapped",
    ]) {
      expect(html).toContain(`/recipes/${page}.html`);
    }
  });

  describe.skipIf(chromium === undefined)("in a browser of 390 px", () => {
    const diagrams = pages.filter(({ text }) => text.includes("```mermaid\n"));
    const pictures = pages.filter(({ text }) => /\]\([^)]*\.svg\)|srcset=/.test(text));
    const others = pages.filter((page) => !diagrams.includes(page) && !pictures.includes(page));

    test("first-contact.md: no page is wider, Mermaid is drawn, and the text of pictures is 8 px at least", async () => {
      const browser = await openBrowser();
      try {
        const page = await browser.newPage();
        const complaints: string[] = [];
        page.on("pageerror", (error) => complaints.push(`${page.url()}: ${JSON.stringify(error)}`));
        await page.setRequestInterception(true);
        page.on("request", (request) => {
          const { protocol, pathname } = new URL(request.url());
          const path = join(out, decodeURIComponent(pathname));
          if (protocol === "data:") return void request.continue();
          if (!existsSync(path)) return void request.respond({ status: 404 });
          const contentType = TYPES[extname(path)] ?? "application/octet-stream";
          return void request.respond({ contentType, body: readFileSync(path) });
        });
        await page.setViewport({ width: 390, height: 844 });
        const found: Record<string, unknown> = {};
        for (const { target, text } of [...diagrams, ...pictures, ...someOf(others, 6)]) {
          await page.goto(`http://site/${target.replace(/\.md$/, ".html")}`);
          const wanted = text.split("```mermaid\n").length - 1;
          if (wanted > 0) await page.waitForFunction(DRAWN, { timeout: 60_000 });
          found[target] = { ...((await page.evaluate(WIDTHS)) as object), wanted };
          expect(found[target], target).toMatchObject({ wide: 390, small: [], drawn: wanted });
        }
        expect(complaints).toEqual([]);
      } finally {
        await browser.close();
      }
    }, 240_000);
  });

  test("has a reference of the packages, and the planner", () => {
    const modules = read("reference/index.html");
    for (const name of ["@kv/interface", "@kv/plan/prove", "@kv/connector/building-blocks"]) {
      expect(modules).toContain(`${name}`);
    }
    const made = readdirSync(join(out, "reference/functions"));
    for (const name of [
      "buildEngineTransferPlan",
      "createPullScheduler",
      "nixlTransport",
      "createProxy",
    ]) {
      expect(made.filter((file) => file.endsWith(`.${name}.html`))).toHaveLength(1);
    }
    expect(read("planner.html")).toContain("kv-plan");
  });
});
