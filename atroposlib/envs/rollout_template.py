# ruff: noqa: E501 (a line break inside <pre> would show)
"""The page's Jinja template, as a module, so that it is there however the package was installed."""

TEMPLATE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}: rollouts</title>
<style>
  :root { color-scheme: light dark; --line: #8884; }
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
  summary { cursor: pointer; padding: .35rem 0; }
  details.group { border-top: 1px solid var(--line); padding: .4rem 0; }
  article { margin: .6rem 0 1rem; border: 1px solid var(--line); border-radius: 6px; overflow: hidden; }
  header { display: flex; gap: 1rem; padding: .3rem .7rem; background: #8881; font-size: 13px; }
  .score { font-weight: 600; }
  .best { color: #16803c; } .worst { color: #c0392b; }
  pre { margin: 0; padding: .7rem; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; }
  .given { opacity: .55; }
  .legend span { padding: 0 .4rem; border-radius: 3px; }
  @media (prefers-color-scheme: dark) { .best { color: #4ade80; } .worst { color: #f87171; } }
</style>
<h1>{{ title }}</h1>
<p>{% if more %}The first {% endif %}{{ groups | length }} groups{% if more %}; the file holds the rest{% endif %}.
  Grey text was given to the model, the rest was sampled.</p>
<p class="legend">A sampled token is shaded by how unlikely it was:
  {% for probability in (1.0, 0.5, 0.1, 0.01) %}<span style="background:{{ shade(probability) }}">p = {{ probability }}</span> {% endfor %}
  (point at a token for its logprob and id)</p>
{% for group in groups %}
<details class="group"{% if loop.first %} open{% endif %}>
  <summary>Group {{ loop.index }}: scores {{ group.scores | join(", ") }}</summary>
  {% for rollout in group.rollouts %}
  <article>
    <header>
      <span class="score {{ rollout.rank }}">score {{ rollout.score }}</span>
      <span>{{ rollout.sampled }} tokens sampled</span>
      {% if rollout.mean_logprob is not none %}<span>mean logprob {{ "%.3f" | format(rollout.mean_logprob) }}</span>{% endif %}
      {% if rollout.weight_version is not none %}<span{% if rollout.trainer_started %} title="of the trainer started {{ rollout.trainer_started }}"{% endif %}>weight version {{ rollout.weight_version }}</span>{% endif %}
      {% if rollout.sampling %}<span>{{ rollout.sampling }}</span>{% endif %}
      {% if rollout.finish_reason %}<span>ended by {{ rollout.finish_reason }}</span>{% endif %}
    </header>
    <pre>{% for part in rollout.parts %}{% if part.given %}<span class="given">{{ part.text }}</span>{% else %}<span style="background:{{ part.shade }}" title="{{ part.title }}">{{ part.text }}</span>{% endif %}{% endfor %}</pre>
  </article>
  {% endfor %}
</details>
{% endfor %}
</html>
"""
