"""German sentences to be translated: some whole, most put together from parts.

Knows: words only. Written for this project: the default target's own German is too poor to stand for what people ask
to have translated.
"""

import random

SENTENCES = (
    """
Der Stadtrat hat am Dienstag beschlossen, die alte Brücke im nächsten Frühjahr zu sanieren.|Die Preise für Strom und
Gas sind im vergangenen Jahr um mehr als zwölf Prozent gestiegen.|Nach Angaben der Polizei wurde bei dem Unfall
niemand verletzt.|"Wir müssen jetzt schnell handeln", sagte Ministerin Anna Weber der Zeitung.|Die Mannschaft aus
Bremen verlor das Spiel trotz einer starken zweiten Halbzeit mit 1:2.|Im Museum am Hafen ist bis Ende August eine
Ausstellung über Schiffe zu sehen.|Die Firma will bis 2030 rund 400 neue Stellen in Leipzig schaffen.|Viele Eltern
wünschen sich längere Öffnungszeiten der Kindergärten.|Der Zug nach München fährt heute wegen eines Schadens an der
Oberleitung nicht.|Herr Schneider wohnt seit vierzig Jahren in demselben Haus am Rande des Waldes.|Forscher der
Universität Jena haben eine neue Art von Käfern entdeckt.|Wer sein Fahrrad am Bahnhof abstellt, sollte es gut
abschließen.|Das Gericht verurteilte den 45 Jahre alten Mann zu einer Haftstrafe von drei Jahren.|Am Wochenende
werden bis zu dreißig Grad und vereinzelt Gewitter erwartet.|Die Feuerwehr war mit sechs Fahrzeugen vor Ort und
konnte den Brand nach zwei Stunden löschen.|Präsident Moreau reist am Montag zu Gesprächen nach Warschau.|Die neue
Straßenbahnlinie verbindet den Norden der Stadt mit dem Krankenhaus.|Er habe von den Plänen nichts gewusst, erklärte
der Bürgermeister.|In der Schule lernen die Kinder, wie man Brot backt und Käse macht.|Der Umsatz des Unternehmens
sank im dritten Quartal auf 2,4 Milliarden Euro.|Sie hatte den Schlüssel verloren und musste die ganze Nacht bei
ihrer Schwester bleiben.|Die Opposition fordert mehr Geld für Schulen und Straßen.|Das Konzert in der Stadthalle war
schon nach wenigen Stunden ausverkauft.|Im Winter kommen die Hirsche bis an den Zaun des Dorfes.|Nach dem Hochwasser
dauerte der Wiederaufbau fast fünf Jahre.|Die Ärzte raten dazu, täglich mindestens eine halbe Stunde spazieren zu
gehen.|Klaus Berger, der Trainer der Gäste, war mit der Leistung zufrieden.|Die Bank schließt im Herbst ihre
Filialen in mehreren kleinen Orten.|Ein Hund bewachte den Hof, während die Familie auf dem Feld arbeitete.|Die
Kommission will noch vor dem Sommer einen Bericht vorlegen.|Für den Umbau des Theaters fehlen noch etwa drei
Millionen Euro.|Auf dem Markt gibt es im Juni frische Erdbeeren und Spargel.
""".replace("\n", " ")
    .strip()
    .split("|")
)

_PEOPLE = [
    "Der Minister", "Die Sprecherin des Verbandes", "Ein Zeuge", "Der Geschäftsführer", "Die Bürgermeisterin",
    "Der Trainer", "Die Ärztin Julia Hoffmann", "Thomas Krüger", "Frau Yilmaz", "Der Vorsitzende der Gewerkschaft",
    "Die Leiterin des Museums", "Ein Mitarbeiter der Bahn", "Der Schriftsteller Peter Lang", "Die Bundeskanzlerin",
    "Der Chef der Feuerwehr", "Die Professorin", "Der Richter", "Die Verkäuferin", "Der Landwirt Josef Huber",
    "Der ehemalige Torwart",
]  # fmt: skip
_SAYS = [
    "sagte {day}, dass {clause}.", "erklärte gegenüber der Zeitung, dass {clause}.", "ist überzeugt, dass {clause}.",
    "bestätigte {day} in {city}, dass {clause}.", "hofft, dass {clause}.", "warnte {day} davor, dass {clause}.",
    "geht davon aus, dass {clause}.", "glaubt nicht, dass {clause}.", "betonte, dass {clause}.",
    "hat schon im vergangenen Jahr darauf hingewiesen, dass {clause}.",
]  # fmt: skip
_CLAUSES = [
    "die Zahl der Besucher weiter steigen wird", "die Kosten höher ausfallen als geplant",
    "der Flughafen erst im nächsten Jahr eröffnet wird", "die Verhandlungen gescheitert sind",
    "viele Häuser dringend saniert werden müssen", "es keine Verletzten gegeben hat",
    "die Straße nach {city} gesperrt bleibt", "das Unternehmen neue Arbeitsplätze schaffen will",
    "die Schüler mehr Sport treiben sollten", "sich das Wetter am Wochenende bessert",
    "der Vertrag mit dem Spieler verlängert wurde", "die Patienten zu lange auf einen Termin warten",
    "der Haushalt noch nicht beschlossen ist", "die Wahl wiederholt werden muss",
    "die Ursache des Feuers unklar ist", "es in den Wäldern wieder Wölfe gibt",
    "der Umzug nach {city} gut vorbereitet war", "die Regierung ihre Versprechen nicht gehalten hat",
    "immer mehr junge Menschen auf das Land ziehen", "die Ernte in diesem Sommer schlecht ausfällt",
]  # fmt: skip
_DAYS = ["am Montag", "am Mittwochabend", "am Freitag", "in der Nacht zum Sonntag", "gestern", "am 3. Oktober"]
_CITIES = [
    "Hamburg", "Köln", "Dresden", "Stuttgart", "Rostock", "Nürnberg", "Wien", "Zürich", "Augsburg", "Freiburg", "Kiel",
    "Erfurt", "Düsseldorf", "Salzburg", "Würzburg", "Mannheim",
]  # fmt: skip
_OBJECTS = [
    "Das Rathaus", "Die Bibliothek", "Das Schwimmbad", "Die Kirche", "Der Bahnhof", "Das Schloss", "Der Spielplatz",
    "Die Fabrik", "Das Hotel", "Der Tierpark", "Die Autobahn", "Die Schule am Marktplatz",
]  # fmt: skip
_HAPPENINGS = [
    "in {city} wird {day} wieder geöffnet.", "in {city} wurde im Jahr {year} gebaut.",
    "wurde {day} für {number} Millionen Euro verkauft.", "ist von {city} aus in {number} Minuten zu erreichen.",
    "bleibt wegen Bauarbeiten bis {day} geschlossen.", "gilt als das Wahrzeichen von {city}.",
    "zählte im vergangenen Jahr {number}.000 Gäste.", "ist seit {year} im Besitz der Stadt.",
    "wurde bei dem Sturm {day} schwer beschädigt.", "soll nach dem Willen der Anwohner erhalten bleiben.",
]  # fmt: skip


def german_sentence(chance: random.Random) -> str:
    """One sentence: a written one at times, else one of some hundred thousand that the parts can form."""
    if chance.random() < 0.25:
        return chance.choice(SENTENCES)
    if chance.random() < 0.5:
        form = f"{chance.choice(_PEOPLE)} {chance.choice(_SAYS)}".replace("{clause}", chance.choice(_CLAUSES))
    else:
        form = f"{chance.choice(_OBJECTS)} {chance.choice(_HAPPENINGS)}"
    return form.format(
        city=chance.choice(_CITIES),
        day=chance.choice(_DAYS),
        year=chance.randint(1650, 2020),
        number=chance.randint(2, 90),
    )
