import { matrix } from "./matrix.js";

matrix({ version: "0.32", mode: "push" });
