// Commands of the package under CPython as WebAssembly.
//
//   node under_pyodide.mjs PYODIDE SITE FOLDER '[["plan", "smoke"], ...]'
//
// PYODIDE: the npm package's folder. SITE: the installed packages. FOLDER: where the commands run.
// Prints one JSON object: the version of Python, and status, stdout and stderr of each command.
import { pathToFileURL } from "node:url";

const [where, site, folder, commands] = process.argv.slice(2);

const PROGRAM = `
import contextlib, io, json, os, sys

sys.path.insert(0, "/site")
os.chdir("/here")
os.environ["HF_HUB_OFFLINE"] = "1"
from launcher.cli import main

done = []
for words in json.loads(commands):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    done.append({"code": code, "out": out.getvalue(), "err": err.getvalue()})
json.dumps({"version": list(sys.version_info[:2]), "done": done})
`;

async function run() {
  const { loadPyodide } = await import(pathToFileURL(`${where}/pyodide.mjs`));
  const python = await loadPyodide();
  python.mountNodeFS("/site", site);
  python.mountNodeFS("/here", folder);
  python.globals.set("commands", commands);
  return python.runPython(PROGRAM);
}

try {
  process.stdout.write(await run());
} catch (error) {
  process.stderr.write(`${error.message}\n`); // node itself would print the whole line, a megabyte of it
  process.exitCode = 1;
}
