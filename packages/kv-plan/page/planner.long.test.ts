// A long suite: the planner in a browser.
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { scratchFolder } from "@kv/testing/scratch-folder";
import type { Browser, Page } from "puppeteer-core";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import { renderText } from "../src/render/render-text.js";
import { captured, model, report } from "../test/captured-run.js";
import { chromium, openBrowser, openPage } from "../test/chromium.js";
import { buildPlanner } from "./build.js";

// The planner as a page: opened from a file, without a server. KV_SCREENSHOTS=FOLDER keeps pictures
// of it.

describe.skipIf(chromium === undefined)("the planner in Chromium", () => {
  const folder = scratchFolder();
  const file = join(folder, "kv-plan.html");
  const complaints: string[] = [];
  let browser: Browser;
  let page: Page;

  const open = async (fragment = "") => {
    await page.goto("about:blank");
    await page.goto(`${pathToFileURL(file).href}#${fragment}`);
    await page.waitForSelector('body[data-ready="true"]');
  };
  const json = (name: string) => JSON.parse(readFileSync(model(name), "utf8")) as object;
  const textOf = (selector: string) => page.$eval(selector, (found) => found.textContent ?? "");
  const fill = async (name: string, value: string) => {
    await page.$eval(
      `[name="${name}"]`,
      (found, text) => {
        (found as HTMLInputElement).value = text;
        found.dispatchEvent(new Event("change", { bubbles: true }));
      },
      value,
    );
  };
  const told = async (args: string) => renderText(await report(args));

  beforeAll(async () => {
    writeFileSync(file, await buildPlanner());
    browser = await openBrowser();
    page = await openPage(browser, complaints);
  }, 180_000);
  afterAll(() => browser?.close(), 60_000);

  test("the report of a known model is that of kv-plan", async () => {
    await open("model=qwen3-0.6b&tp=4,2&block=16,32&tokens=100");
    expect(await textOf("#text")).toBe(
      await told(`--config ${model("qwen3-0.6b")} --tp 4,2 --block-size 16,32 --tokens 100`),
    );
    expect(await textOf("#verdict")).toMatch(/^Proven/);
    // vllm#55434
    expect(await textOf("#posting")).toMatch(
      /D0 posts [\d,]+ descriptors.*posting over UCX.*fewer with/,
    );
  });

  test("a config.json that is pasted is planned, and the link carries it", async () => {
    await open();
    await page.select("#model", "");
    expect(await textOf("#problem")).toMatch(/config\.json: .*KV_CONFIG_INVALID/);
    await fill("config", readFileSync(model("deepseek-v3"), "utf8"));
    await fill("tp", "8,16");
    const text = await textOf("#text");
    expect(text).toContain("prefill TP 8 → decode TP 16");
    const link = page.url();
    await page.goto("about:blank");
    await page.goto(link);
    expect(await textOf("#text")).toBe(text);
    expect(await page.$eval("[name=tp]", (found) => (found as HTMLInputElement).value)).toBe(
      "8,16",
    );
  });

  test("known models stand in the family of their rules", async () => {
    await open();
    const groups = await page.$$eval("#model optgroup", (found) =>
      found.map((group) => [group.label, group.textContent] as const),
    );
    expect(groups.length).toBeGreaterThan(8);
    expect(Object.fromEntries(groups)).toMatchObject({
      "Nemotron-H": "nemotron-3-nano-30b",
      "Llama 4": "llama-4-scout",
      Jamba: "jamba-1.5-mini",
    });
  });

  test("a TP size that vLLM refuses, and a pasted config with a field that is not understood: kv-plan's own refusals", async () => {
    await open("model=nemotron-3-nano-30b&tp=64,1");
    expect(await textOf("#reason")).toContain("cannot be split over TP size 64: vLLM refuses");
    expect(await textOf("#changes")).toContain("prefill with TP 2");
    await page.select("#model", "");
    await fill("config", JSON.stringify({ ...json("qwen3-0.6b"), full_attention_interval: 4 }));
    expect(await textOf("#reason")).toContain(
      "full_attention_interval (4): a field that may decide",
    );
    expect(await page.$("#changes")).toBeNull();
  });

  test("a hybrid's kinds of caches stand apart, each with its bytes and a bar", async () => {
    await page.setViewport({ width: 1280, height: 900 });
    await open("model=nemotron-3-nano-30b&tp=1&tokens=8192");
    const bars = await page.$$eval(".wide .kind", (found) =>
      found.map((bar) => Number(bar.getAttribute("width"))),
    );
    expect(bars).toHaveLength(2);
    expect(bars[0]).toBeGreaterThan(bars[1] ?? Number.POSITIVE_INFINITY);
    const picture = await textOf(".wide svg");
    expect(picture).toMatch(/full attention: [\d.]+ MiB in 6 layers/);
    expect(picture).toMatch(/states: [\d.]+ MiB in 23 layers/);
    await open("model=qwen3-0.6b&tp=1");
    expect(await page.$(".kind")).toBeNull();
  });

  test.each([
    "llama-3.1-70b&tp=8,4",
    "deepseek-v3&tp=8,2",
    "nemotron-3-nano-30b&tp=1",
    "gemma-4-31b&tp=1&pp=1",
  ])("at 390 px the picture and its legend are whole: %s", async (fragment) => {
    await page.setViewport({ width: 390, height: 900 });
    await open(`model=${fragment}`);
    const outside = await page.$$eval(".narrow svg text", (found) =>
      found.flatMap((each) => {
        const { x, y, width } = (each as SVGTextElement).getBBox();
        const view = (each as SVGTextElement).ownerSVGElement?.viewBox.baseVal;
        const isInside =
          view !== undefined && x >= 0 && x + width <= view.width && y <= view.height;
        return isInside ? [] : [each.textContent];
      }),
    );
    expect(outside).toEqual([]);
  });

  test("a refused pair shows the reason and the changes that help", async () => {
    await open("model=llama-3.1-70b&tp=8,4&layout=LHBNC");
    expect(await textOf("#result h2:nth-of-type(2)")).toBe("Refused");
    expect(await textOf("#changes")).toContain("decode with TP 8");
  });

  test.each([
    ["tp=x", "TP: x is not a whole number from 1 to 1024"],
    ["layout=XYZ", "Layout: XYZ is not HND, NHD or one of"],
    ["model=none", "Model: none is none of "],
    ["model=constructor", "Model: constructor is none of "],
    ["layout=constructor", "Layout: constructor is not HND, NHD or one of"],
    ["bandwidth=-1", "Bandwidth: -1 is not a number above 0"],
    ["tp=1,2,4", "--tp is given 3 times"],
    ["model=&config=%3C/script%3E%3Cimg%20src%3Dx%3E", "config.json: "],
  ])("a wrong value (%s) is told, with its field", async (fragment, message) => {
    await open(fragment);
    expect(await textOf("#problem")).toMatch(message);
    expect(await page.$$("img")).toEqual([]);
  });

  test("the picture is saved as a file, as kv-plan prints it", async () => {
    await open("model=llama-3.1-70b&tp=4,2&tokens=64");
    const session = await browser.target().createCDPSession();
    await session.send("Browser.setDownloadBehavior", { behavior: "allow", downloadPath: folder });
    const args = `--config ${model("llama-3.1-70b")} --tp 4,2 --tokens 64`;
    await page.click("#save-svg");
    const { stdout } = await captured(`${args} --svg`);
    await expect.poll(() => readOrNothing(join(folder, "kv-plan.svg"))).toBe(stdout);
  });

  test("the keyboard reaches every part, in order", async () => {
    await open("model=llama-3.1-70b&tp=2,1&tokens=32");
    const reached: string[] = [];
    for (let i = 0; i < 40; i++) {
      await page.keyboard.press("Tab");
      reached.push(
        await page.evaluate(() => {
          const found = document.activeElement as HTMLElement;
          return found.getAttribute("name") ?? (found.id || (found.textContent ?? ""));
        }),
      );
      if (reached.at(-1) === "text") break;
    }
    const fields = [
      "model",
      "tp",
      "block",
      "layout",
      "pp",
      "backend",
      "dtype",
      "tokens",
      "computed",
      "bandwidth",
      "memory",
      "weights",
    ];
    const rest = ["permute", "copy-link", "save-svg", "P0", "P1", "D0", "text"];
    expect(reached).toEqual([...fields, ...rest]);
  });

  test.each([
    [390, "light"],
    [390, "dark"],
    [1280, "light"],
    [1280, "dark"],
  ] as const)(
    "%i px wide, %s: nothing is wider than the page, and text stands out",
    async (width, scheme) => {
      await page.setViewport({ width, height: 900 });
      await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
      await open("model=llama-3.1-70b&tp=8,4&block=16,32");
      await page.click('button[data-decode-rank="1"]');
      await page.click("#blocks button");
      const [scrolled, ...contrasts] = await page.evaluate(() => {
        const light = (colour: string) => {
          const [r = 0, g = 0, b = 0] = (colour.match(/[\d.]+/g) ?? []).map((part) => {
            const value = Number(part) / 255;
            return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
          });
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const contrast = (one: string, other: string) => {
          const [high, low] = [light(one), light(other)].sort((a, b) => b - a) as [number, number];
          return (high + 0.05) / (low + 0.05);
        };
        const paper = getComputedStyle(document.body).backgroundColor;
        const shown = [...document.querySelectorAll(".kv-plan")].filter(
          (each) => each.clientWidth > 0,
        );
        const drawn = shown.flatMap((each) => [...each.querySelectorAll("text")]);
        const curves = shown.flatMap((each) => [...each.querySelectorAll(".edge")]);
        return [
          document.documentElement.scrollWidth,
          contrast(getComputedStyle(document.body).color, paper),
          ...drawn.map((each) => contrast(getComputedStyle(each).fill, paper)),
          // Lines need less than letters (WCAG 1.4.11).
          ...curves.map((each) => 1.5 * contrast(getComputedStyle(each).stroke, paper)),
        ];
      });
      expect(scrolled).toBeLessThanOrEqual(width);
      expect(contrasts.length).toBeGreaterThan(30);
      expect(Math.min(...contrasts)).toBeGreaterThanOrEqual(4.5);
      const keep = process.env["KV_SCREENSHOTS"];
      if (keep === undefined) return;
      mkdirSync(keep, { recursive: true });
      await page.screenshot({ path: join(keep, `planner-${width}-${scheme}.png`), fullPage: true });
    },
  );

  test("first-contact.md 9: labels of a row stand at one height, and no line of the plan is cut", async () => {
    await page.setViewport({ width: 1280, height: 900 });
    await open("model=llama-3.1-70b&tp=8,4&tokens=4000");
    const [heights, ...scrolled] = await page.evaluate(() => {
      const fields = document.querySelectorAll("#form label:not(.whole) > *");
      const text = document.querySelector("#text") as HTMLElement;
      return [
        [...new Set([...fields].map((each) => each.getBoundingClientRect().height))],
        text.scrollWidth,
        text.clientWidth,
      ];
    });
    expect(heights).toHaveLength(1);
    expect(scrolled[0]).toBe(scrolled[1]);
  });

  test("the page asks nothing of a network and logs no error", () => {
    expect(complaints).toEqual([]);
  });
});

function readOrNothing(path: string): string | undefined {
  try {
    return readFileSync(path, "utf8");
  } catch {
    return undefined;
  }
}
